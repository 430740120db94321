import pytest

from locks_hf.timing.profile import TERMS, summarise_events, term_of
from locks_hf.timing.tables import profile_table


@pytest.mark.parametrize(
    ("kernel", "term"),
    (
        ("_attend_combine_kernel", "attend"),
        ("_score_kernel", "score"),
        ("_combine_kernel", "select"),
        ("combine_kernel", "select"),
        ("attend_kernel", "attend"),
        ("score_kernel", "score"),
        ("_linear_kernel", "weights"),
        ("void flash::flash_fwd_splitkv_combine_kernel<...>", "dense"),
        ("_end_kernel", "attend"),
        ("_top_pages_kernel", "select"),
        ("_append_kernel", "append"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x128", "dense"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>", "dense"),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel", "dense"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "weights"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "weights"),
        ("triton_red_fused__to_copy_mul_pow_3", "other"),
    ),
)
def test_kernels_are_told_apart_by_name(kernel, term):
    assert term_of(kernel) == term


def test_events_are_added_up_a_step_with_the_gaps_between_them():
    events = [
        ("_score_kernel", 0.0, 4.0),
        ("nvjet_x", 5.0, 10.0),
        ("_score_kernel", 20.0, 6.0),
        ("nvjet_x", 27.0, 13.0),
    ]
    summary = summarise_events(events, 2)
    assert summary["span_us"] == 20.0 and summary["kernels"] == 2
    assert summary["terms_us"] == {**dict.fromkeys(TERMS, 0.0), "score": 5.0, "weights": 11.5, "gaps": 3.5}
    assert summary["top"][0] == ["nvjet_x", 1.0, 11.5]
    assert summarise_events([], 2) is None


def test_a_kernel_that_waits_for_another_counts_from_its_end():
    events = [("_score_kernel", 0.0, 10.0), ("_combine_kernel", 4.0, 8.0), ("_attend_split_kernel", 5.0, 6.0)]
    terms = summarise_events(events, 1)["terms_us"]
    assert (terms["score"], terms["select"], terms["attend"], terms["gaps"]) == (10.0, 2.0, 0.0, 0.0)


def test_the_table_has_profiled_cells_alone():
    cell = {"cell": {"context": 1024, "batch": 1, "arm": "locks-r4i4"}, "status": "ok"}
    assert profile_table([cell, {**cell, "profile": None}]) == ""
    profiled = {**cell, "profile": summarise_events([("_attend_split_kernel", 0.0, 7.0)], 1)}
    assert "| 1K" in profile_table([profiled]) and " 7 |" in profile_table([profiled])
