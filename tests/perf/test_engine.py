"""The engine once: times and memory, checks, peers, ratios, selection of rows, profiles by kind of kernel."""

import dataclasses
from functools import partial

import pytest
import torch

from linrec.ops import gate_loop
from perf import cells, engine, lines, loops, loss, matrix, nonlinear, operations, ops, table
from perf.__main__ import COMMANDS
from perf.engine import BOTH, FORWARD, PASSES, Calls, Implementation
from perf.kernels import KINDS, Kernel, kind_of, summary
from perf.operations import OPERATIONS, Row
from perf.timing import Bench, Budget, Timing, UnsuitedError, Windows, why
from tests.perf.conftest import wrong

CPU = Bench(torch.device("cpu"), Budget(0, 0), Windows(1, 0.0))


def row(operation="scan", dtype="f32", size=(2, 48, 4), targets=(50, 80)):
    return Row(operation, size, dtype, targets)


def timing(ms):
    return Timing(ms, ms, ms)


def test_percentiles(monkeypatch):
    monkeypatch.setattr("perf.timing._repeat", lambda *rest, **named: [*range(10, -1, -1)])
    assert dataclasses.replace(CPU, budget=Budget()).measure(lambda: None) == Timing(5, 2, 8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_replayed_call_runs_once_to_compile_and_once_to_capture():
    x, calls = torch.zeros(1, device="cuda"), []

    def call():
        calls.append(x.add_(1))

    bench = Bench(x.device, Budget(1, 1))
    bench.measure(call, replayed=True)
    assert len(calls) == 2 and x > 2
    # a call that cannot be captured is timed as it is
    calls.clear()
    bench.measure(lambda: calls.append(x.item()), replayed=True)
    assert len(calls) > 2


def test_a_long_step_is_timed_once(monkeypatch):
    calls = []
    monkeypatch.setattr(Bench, "time_once", lambda self, call: 2000.0 if call() is None else 0.0)
    call, settle = (partial(calls.append, name) for name in ("step", "settled"))
    found = CPU.steps(call, warm=3, settle=settle, longest_ms=1000.0)
    # the first step, three more, and the timed one
    assert calls == ["step", "settled", *4 * ["step"]]
    assert found.rate == (0.5, 0.5, 0.5, 1)
    assert found.held_bytes is found.peak_bytes is None


def test_memory_is_found_behind_the_errors_that_hide_it(capsys):
    hidden = RuntimeError("operation failed due to a previous error during capture")
    hidden.__context__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert why(hidden) == why(RuntimeError("Triton Error [CUDA]: out of memory")) == "out of memory"
    assert why(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")) == "out of memory"
    assert why(UnsuitedError("has no scan")) == "has no scan"
    assert capsys.readouterr().err == ""
    assert why(RuntimeError("out of resource: memory\nand more")) == "RuntimeError: out of resource: memory"
    assert "out of resource" in capsys.readouterr().err
    assert len(why(ValueError("long " * 100))) <= 120


def test_percentages_and_targets_follow_from_bytes_time_and_rate(monkeypatch):
    monkeypatch.setattr(Bench, "measure", lambda *rest, **named: timing(2.0))
    bench = dataclasses.replace(CPU, copy=4e6)
    # 384 floats: 4,608 and 12,288 bytes in 2 ms, of 8,000 bytes
    forward, both = ops.Ops("cpu").measure(bench, row())["passes"].values()
    assert forward["bytes"] == 4608 and forward["percent"] == pytest.approx(57.6) and forward["met"]
    assert both["bytes"] == 12288 and both["percent"] == pytest.approx(153.6) and both["met"]
    slow = dataclasses.replace(CPU, copy=8e6)
    slower = ops.Ops("cpu").measure(slow, row())["passes"][FORWARD]
    assert not slower["met"] and slower["rate"] == 8e6
    assert ops.Ops("cpu").measure(slow, row(targets=(None, None)))["passes"][FORWARD]["met"] is None


def test_the_yardstick_of_the_cpu_moves_as_many_bytes(monkeypatch):
    monkeypatch.setattr("perf.timing._repeat", lambda function, *rest, **named: [2.0, 2.0])
    entry = engine.beside_yardstick(CPU, lambda: None, 1212, torch.float32)
    assert entry["ms"] == entry["called_ms"] == {"median": 2.0, "p20": 2.0, "p80": 2.0}
    # both move 101 times three numbers
    assert entry["rate"] == pytest.approx(1212 / 2e-3) and entry["percent"] == pytest.approx(100)


def test_the_yardstick_of_cuda_is_a_copy(monkeypatch):
    monkeypatch.setattr(Bench, "on_cuda", True)
    monkeypatch.setattr(Bench, "measure", lambda *rest, **named: timing(2.0))
    bench, fields = CPU.with_copy(quick=True)
    # a MiB is read and written in 2 ms
    assert bench.copy == fields["copy_rate"] == 2**21 / 2e-3 and fields["yardstick"] == "a copy on the device"


def test_peers_that_cannot_are_listed_with_the_reason(monkeypatch):
    def raises(operation, inputs, dy):
        raise RuntimeError("needs CUDA\nTraceback ...")

    def unsuited(operation, inputs, dy):
        raise UnsuitedError("has no scan")

    def other(operation, inputs, dy):
        return Calls({FORWARD: lambda: None, BOTH: lambda: None}, lambda: (2 * inputs[1],))

    def different(operation, inputs, dy):
        return dataclasses.replace(other(operation, inputs, dy), same=False)

    def half(operation, inputs, dy):
        run = OPERATIONS[operation].run
        return Calls({FORWARD: lambda: None, BOTH: lambda: 1 / 0}, lambda: (run(*inputs),))

    peers = [
        Implementation("absent", "", "a_module_that_is_not_there", raises),
        Implementation("raises", "", "torch", raises),
        Implementation("unsuited", "", "torch", unsuited),
        Implementation("other", "", "torch", other),
        Implementation("different", "", "torch", different),
        Implementation("half", "", "torch", half),
    ]
    monkeypatch.setattr(ops.Ops, "known", peers)
    passes = ops.Ops("cpu", peers=True).measure(CPU, row())["passes"]
    forward, both = (passes[name]["peers"] for name in PASSES)
    assert forward["absent"] == {"missing": "not installed"}
    assert forward["raises"] == {"missing": "RuntimeError: needs CUDA"}
    assert forward["unsuited"] == {"missing": "has no scan"}
    assert forward["other"]["off"] > 0.05 and "ms" in forward["other"] and "off" not in forward["half"]
    assert "off" not in forward["different"]
    assert forward["half"]["ratio"] == passes[FORWARD]["ms"]["median"] / forward["half"]["ms"]["median"]
    assert both["half"] == {"missing": "ZeroDivisionError: division by zero"}


def test_an_output_that_is_no_number_differs_from_everything():
    assert engine.difference(torch.tensor([1.0, torch.nan]), torch.ones(2)) == float("inf")


def test_ratios_to_a_baseline():
    def entry(ms, called):
        return {"ms": {"median": ms}, "called_ms": {"median": called}}

    def too_long():
        raise UnsuitedError("over 1,000 steps")

    def called(bench, calls, one):
        return calls.passes[one]()

    def calls(forward, both):
        return lambda: Calls({FORWARD: forward, BOTH: both}, lambda: ())

    implementations = {
        "loop": calls(lambda: entry(6, 8), too_long),
        "fused": calls(lambda: entry(2, 1), lambda: entry(3, 3)),
        "absent": too_long,
    }
    forward, both = engine.measure_each(CPU, implementations, "loop", called)["passes"].values()
    assert (forward["fused"]["ratio"], forward["fused"]["called_ratio"]) == (3, 8)
    assert forward["loop"]["ratio"] == 1 and "ratio" not in both["fused"]
    assert both["loop"] == forward["absent"] == both["absent"] == {"missing": "over 1,000 steps"}


def test_a_failing_operation_is_not_timed(monkeypatch):
    def broken(*rest, **named):
        raise RuntimeError("no such kernel\nand much more")

    monkeypatch.setattr("perf.operations.scan", broken)
    result = ops.Ops("cpu").measure(CPU, row())
    assert (
        result["error"] == "linrec: failed, so not timed: RuntimeError: no such kernel"
        and "passes" not in result
    )


@pytest.mark.parametrize(
    ("module", "name", "arguments", "told"),
    [
        (loops, "slstm_steps", ["loops"], "b2-d4-f32: loop: wrong, so not timed: h: "),
        (nonlinear, "nonlinear_scan", ["nonlinear"], "lem-n4-t20: loop: wrong, so not timed: h: "),
        (loss, "linear_cross_entropy", ["loss"], "12x8x20: linrec: wrong, so not timed: loss: "),
        (matrix, "delta_rule", ["matrix"], "delta-f32-2x70x2x8: linrec: wrong, so not timed: y: "),
        (operations, "scan", ["ops"], "scan-f32-2x64x16: linrec: wrong, so not timed: y: "),
    ],
)
def test_wrong_results_are_not_timed_and_the_rest_goes_on(module, name, arguments, told, monkeypatch, run):
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    status, results, printed = run(*arguments)
    assert status == 1 and told in " ".join(printed.split())
    entries = [record for record in results["rows"] if "error" not in record]
    assert all("passes" in record for record in entries)
    assert bool(entries) == (arguments[0] in ("matrix", "ops"))


@pytest.mark.parametrize(
    "name", ["ops", "matrix", "steps", "learners", "loops", "nonlinear", "cells", "loss"]
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_names_of_rows_are_unique_and_select_them(name, device):
    kind = COMMANDS[name]
    found = kind(device).chosen()
    assert all(row.name == name for name, row in found.items())
    if name == "cells":
        return
    assert len(found) == len(kind(device).all_rows())
    last = list(found)[-1]
    assert list(kind(device, rows=(last,)).chosen()) == [last]
    with pytest.raises(ValueError, match="did you mean"):
        kind(device, rows=(last + "0",)).chosen()


def test_rows_of_a_gpu():
    rows = nonlinear.Nonlinear("cuda").chosen()
    assert rows["lem-n512-t100000"].batch == 1
    for name, left_out in (
        ("lem-n16-t1000", []),
        ("lem-n64-t1000", ["newton"]),
        ("tanh-n64-t10000", ["loop"]),
    ):
        assert [each for each in nonlinear.METHODS if nonlinear.left_out(rows[name], each)] == left_out
    of_cells = cells.Cells("cuda", models=("lem", "unicornn")).chosen().values()
    shapes = {(row.time, row.batch, row.size) for row in of_cells}
    assert len(of_cells) == 18 and shapes == {(1000, 50, 128), (4000, 50, 128), (17_984, 8, 128)}
    eager = {(row.model, row.gradient) for row in of_cells if not row.compiled}
    assert eager == {("unicornn", "adjoint"), ("unicornn", "reversible")}


def test_reasons_are_shown_once_with_their_share():
    first = {"fla": {"missing": "runs on CUDA alone"}, "jax": {"missing": "has no conv"}}
    second = {"fla": {"missing": "runs on CUDA alone"}, "jax": {"ms": {}, "ratio": 1.0}}
    first["warp"], second["warp"] = {"off": 0.0849}, {"off": 0.06}
    assert [*table.missing_peers([{"peers": first}, {"peers": second}])] == [
        "warp: outputs differ from linrec's by up to 8% of the largest",
        "fla: runs on CUDA alone",
        "jax: has no conv (1 of 2)",
    ]


def line(name):
    return next(line for line in lines.LINES if line.name == name)


def test_a_step_is_measured_with_both_backends(monkeypatch):
    called = []

    def spied(*xs, **options):
        called.append(options["backend"])
        return gate_loop(*xs, **options)

    monkeypatch.setattr(lines, "gate_loop", spied)
    result = line("step").measured(CPU, quick=True)
    ratio = result["kernels_ms"]["median"] / result["torch_ms"]["median"]
    assert result["value"] == pytest.approx(ratio) and result["met"] == (ratio <= 1 / 3)
    # the calls of the second half, one for each block and step
    assert called and set(called) == {"torch"} and len(called) % 4 == 0


def test_peaks_are_compared_with_the_bytes_that_are_needed(monkeypatch):
    # the memory of a CPU is not counted
    result = line("memory-f32").measured(CPU, quick=True)
    assert "the memory of cpu is not counted" in result["error"] and "value" not in result
    # beside the five inputs and dy of 2,048 floats: y and five gradients
    monkeypatch.setattr(Bench, "peak_of", lambda self, call: 6 * 2048 * 4)
    found = line("memory-f32").measured(CPU, quick=True)
    assert found["value"] == 1 and found["met"] and found["needed_bytes"] == 12 * 2048 * 4
    ratios = line("memory-conv").measured(CPU, quick=True)["rows"]
    # K of 16 x 64 in float32, and u of 2,048 numbers
    assert ratios["conv-f32-2x64x16"] == 6 * 2048 / (1024 + 2048)


@pytest.mark.parametrize(
    ("kind", "names"),
    {
        "recurrence": "forward backward backward_0d1d2d3 chunk_states gate_gradients short_conv",
        "matrix products": """
            nvjet_hsh_192x192_64x3_2x1_v_bz_coopB_TNN triton_tem_fused_mm_t_4 row_products
            sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64
            void~cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>
            void~cublasLt::splitKreduce_kernel<32,~16,~int,~float,~__nv_bfloat16>""",
        "attention": """
            triton_tem_fused_flex_attention_0
            void~pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64,~128>>
            cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x64
            fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)""",
        "loss": """
            triton_red_fused__to_copy_exp_max_sub_sum_12 triton_red_fused_argmax_view_6
            triton_poi_fused__to_copy_arange_clamp_div_eq_exp_gather_ne_scalar_tensor_select_17
            triton_red_fused__log_softmax_nll_loss_forward_5
            void~at::native::(anonymous~namespace)::cunn_SoftMaxForward<4,~float,~float,~float>
            void~at::native::(anonymous~namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>""",
        # the first prepares attention's arguments; then HGRN's lower bounds
        "elementwise and norms": """
            triton_poi_fused__scaled_dot_product_flash_attention_transpose_3
            triton_poi_fused__softmax_add_cos_mul_neg_rsub_select_sigmoid_sin_6
            triton_poi_fused_abs_add_clamp_div_exp_gate_loop_chunkwise_triton_14
            vectorized_layer_norm_backward_kernel
            void~at::native::vectorized_elementwise_kernel<4,~at::native::FillFunctor<float>>
            void~at::native::reduce_kernel<512,~1,~at::native::ReduceOp<float>>""",
        "optimiser": """
            void~at::native::(anonymous~namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float,~4>>
            void~at::native::multi_tensor_apply_kernel<TensorListMetadata<1>,~LpNormFunctor<float>>
            triton_for_fused_2""",
        "copies": "Memcpy~DtoD~(Device~->~Device) Memset~(Device)",
        "rest": """
            void~at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<Policy900,~false,~long>
            compute_grad_weight""",
    }.items(),
)
def test_kernels_are_told_apart_by_their_names(kind, names):
    assert kind in KINDS
    assert {name: kind_of(name.replace("~", " ")) for name in names.split()} == dict.fromkeys(
        names.split(), kind
    )


def test_a_profile_is_summed_up():
    kernels = [
        Kernel("nvjet_a", 250, 350),
        Kernel("forward", 100, 200),
        # side by side with the last product
        Kernel("forward", 300, 400),
        Kernel("Memset (Device)", 475, 500),
    ]
    found = summary(kernels, steps=2)
    assert found["step_ms"] == 0.2
    # 50 before the first product and 75 behind the last recurrence
    assert found["idle"] == pytest.approx(125 / 400)
    assert found["kinds"]["recurrence"] == {"ms": pytest.approx(0.1), "share": 0.5}
    assert found["kinds"]["matrix products"] == {"ms": pytest.approx(0.05), "share": 0.25}
    assert found["kinds"]["loss"] == {"ms": 0, "share": 0} and set(found["kinds"]) == set(KINDS)
    assert [(k["name"], k["kind"], k["calls"]) for k in found["kernels"]] == [
        ("forward", "recurrence", 1.0),
        ("nvjet_a", "matrix products", 0.5),
        ("Memset (Device)", "copies", 0.5),
    ]
    assert len(summary([Kernel(f"nvjet_{n}", n, n + 1) for n in range(40)], 1)["kernels"]) == 25
    with pytest.raises(ValueError, match="`runs`"):
        summary([], 1)
