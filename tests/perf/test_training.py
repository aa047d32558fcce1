import dataclasses
import itertools
import json

import pytest
import torch
from torch.nn import functional

from linrec.lab.train import LoopConfig
from linrec.models import LanguageModel, ModelConfig
from perf import training
from perf.__main__ import main
from perf.kernels import KINDS, Kernel, kind_of, summary
from perf.sizes import MODELS, sized
from perf.training import OPTIM, flops_per_token, make_step, model_config
from tests.tiers import thorough


def run(folder, *arguments):
    status = main(["training", "--device", "cpu", "--quick", "--out", str(folder), *arguments])
    (path,) = folder.glob("*.json")
    return status, json.loads(path.read_text())


def test_presets_are_measured_with_their_own_and_with_other_mixers(tmp_path, capsys):
    presets = ["--presets", "wikitext103-hgrn", "wikitext103"]
    status, results = run(tmp_path, *presets, "--mixers", "hgru", "gate_loop", "attention")
    assert status == 0
    jobs = [(p, m) for p in presets[1:] for m in ("hgru", "gate_loop", "attention")]
    assert [(model["preset"], model["mixer"]) for model in results["models"]] == jobs
    loop, rate = results["protocol"]["loop"], results["matmul"]["rate"]
    assert loop["precision"] == "bf16-mixed" and not loop["deterministic"] and rate > 0
    for model in results["models"]:
        tokens = model["tokens_per_second"]
        assert 0 < tokens["lowest"] <= tokens["median"] <= tokens["highest"]
        # 2 sequences of 16 tokens
        assert model["step_ms"] == pytest.approx(32e3 / tokens["median"])
        per_second = tokens["median"] * model["flops_per_token"]
        assert model["flops_per_second"] == pytest.approx(per_second)
        assert model["share_of_matmul"] == pytest.approx(per_second / rate)
        config = ModelConfig(**model["config"])
        assert model["parameters"] == sum(p.numel() for p in LanguageModel(config).parameters())
        assert model["peak_bytes"] is None and "profile" not in model
    shown = capsys.readouterr().out
    assert "bf16-mixed" in shown and shown.count("gate_loop") == 2
    assert max(len(line) for line in shown.splitlines() if not line.startswith("wrote ")) <= 80


@thorough
def test_models_of_one_size_are_measured_beside_a_peer(tmp_path, capsys, monkeypatch):
    small = torch.nn.Linear(3, 5)
    monkeypatch.setattr(training, "fla_model", lambda model, size: small)
    monkeypatch.setattr(training, "make_fla_step", lambda *rest: lambda *batch: None)
    status, results = run(tmp_path, "--models", "gla", "lru", "--peers")
    assert status == 0
    assert [(model["preset"], model["mixer"]) for model in results["models"]] == [
        ("374M", "gla"),
        ("374M", "lru"),
    ]
    for model in results["models"]:
        assert model["fla"]["parameters"] == 20 and model["fla"]["tokens_per_second"]["median"] > 0
    assert "flash-linear-attention" in capsys.readouterr().out


@thorough
def test_measurements_of_models_are_added_to_earlier_ones(tmp_path, capsys, monkeypatch):
    small = torch.nn.Linear(3, 5)
    monkeypatch.setattr(training, "fla_model", lambda model, size: small)
    monkeypatch.setattr(training, "make_fla_step", lambda *rest: lambda *batch: None)
    run(tmp_path, "--models", "hgrn2", "gla", "--peers")
    _, first = run(tmp_path, "--models", "lru")
    assert [entry["mixer"] for entry in first["models"]] == ["gla", "hgrn2", "lru"]
    _, second = run(tmp_path, "--models", "gla")
    before, after = ({entry["mixer"]: entry for entry in found["models"]} for found in (first, second))
    # measured again, and its peer not
    assert before["gla"]["step_ms"] != after["gla"]["step_ms"] and after["gla"]["fla"] == before["gla"]["fla"]
    assert after["lru"] == before["lru"] and after["gla"]["command"] != after["lru"]["command"]
    (picture,) = tmp_path.glob("*.png")
    assert picture.stat().st_size > 5000
    assert main(["training", "--device", "cpu", "--quick", "--out", str(tmp_path), "--models", "gla"]) == 0
    arguments = ["--models", "gla", "--matmul-precision", "highest"]
    assert main(["training", "--device", "cpu", "--quick", "--out", str(tmp_path), *arguments]) == 2
    assert "holds measurements with another protocol; remove the file" in capsys.readouterr().err


@thorough
def test_a_peer_that_refuses_to_train_is_measured_forward(tmp_path, capsys, monkeypatch):
    small = torch.nn.Linear(3, 5)
    passes = []

    def refuse(*batch):
        raise RuntimeError("wrong gradients on this device")

    def forward(*batch):
        passes.append(torch.is_grad_enabled())

    monkeypatch.setattr(training, "fla_model", lambda model, size: small)
    monkeypatch.setattr(training, "make_fla_step", lambda *rest: refuse)
    monkeypatch.setattr(training, "fla_loss", forward)
    status, results = run(tmp_path, "--models", "gla", "--peers")
    (model,) = results["models"]
    assert status == 0 and "wrong gradients" in model["fla"]["missing"]
    assert passes and not any(passes)
    for found in (model["forward"], model["fla"]["forward"]):
        assert found["tokens_per_second"]["median"] > 0
    shown = capsys.readouterr().out
    assert "forward alone, where it refuses to train" in shown and "wrong gradients" in shown
    # the peer is kept when the model is measured again without it
    _, again = run(tmp_path, "--models", "gla")
    assert again["models"][0]["fla"] == model["fla"]
    assert again["models"][0]["forward"]["step_ms"] != model["forward"]["step_ms"]


def test_a_peer_without_the_model_is_told(tmp_path, capsys):
    status, results = run(tmp_path, "--models", "lru", "--peers")
    assert status == 0 and results["models"][0]["fla"]["missing"] == "has no such model"
    assert "374M, lru, flash-linear-attention: has no such model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "glaa"], "did you mean 'gla'"),
        (["--models", "gla", "--size", "375M"], "did you mean '374M'"),
        (["--models", "gla", "--mixers", "lru"], "--mixers is for presets"),
        (["--peers"], "name them by --models"),
    ],
)
def test_models_that_do_not_fit_are_refused(arguments, message, capsys):
    assert main(["training", "--device", "cpu", "--quick", *arguments]) == 2
    assert message in capsys.readouterr().err


@thorough
@pytest.mark.parametrize("name", MODELS)
def test_every_model_of_a_size_builds(name):
    model, size = sized(name, "374M")
    with torch.device("meta"):
        count = sum(p.numel() for p in LanguageModel(model.config(size)).parameters())
    assert count / 374e6 == pytest.approx(1, abs=0.3)


def test_models_of_one_size_but_for_the_mixer():
    sizes = {}
    for mixer in ("hgru", "gate_loop", "attention"):
        config = model_config("wikitext103-hgrn", mixer)
        with torch.device("meta"):
            sizes[mixer] = sum(p.numel() for p in LanguageModel(config).parameters()) / 1e6
    assert sizes["hgru"] == pytest.approx(46.25, abs=0.01)
    assert sizes["gate_loop"] == pytest.approx(46.25, abs=0.1)
    assert sizes["attention"] == pytest.approx(41.5, abs=0.1)


def test_flops_are_six_for_each_parameter_in_a_product():
    config = ModelConfig(vocab_size=11, n_outputs=7, d_model=8, n_layers=2, d_channel_mixing=12)
    model = LanguageModel(config)
    every = sum(p.numel() for p in model.parameters())
    assert flops_per_token(model, 100) == 6 * (every - 11 * 8)
    # the head's product is one, whoever else has its matrix
    tied = LanguageModel(dataclasses.replace(config, n_outputs=None, tie_embeddings=True))
    assert flops_per_token(tied, 100) == 6 * sum(p.numel() for p in tied.parameters())
    attention = LanguageModel(dataclasses.replace(config, mixer="attention"))
    every = sum(p.numel() for p in attention.parameters())
    # half of 2 * 2 * 100 * 8 for scores and for values, three times, in 2 layers
    assert flops_per_token(attention, 100) == 6 * (every - 11 * 8) + 2 * 3 * (2 * 2 * 100 * 8) // 2


def test_the_step_is_that_of_training():
    config = ModelConfig(vocab_size=11, d_model=8, n_layers=1, d_channel_mixing=8)
    loop = LoopConfig(batch_size=2, accumulate=2, device="cpu")
    model, step = make_step(lambda: LanguageModel(config), OPTIM, loop)
    tokens = torch.arange(22).reshape(2, 11) % 11
    losses = []
    for _ in range(20):
        with torch.no_grad():
            logits, _ = model(tokens[:, :-1])
        losses.append(float(functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())))
        step(tokens[:, :-1], tokens[:, 1:])
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))


def test_too_little_memory_is_told_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    class Large(LanguageModel):
        def hidden(self, *given, **options):
            if self.config.mixer == "hgru":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
            return super().hidden(*given, **options)

    monkeypatch.setattr(training, "LanguageModel", Large)
    status, results = run(tmp_path, "--mixers", "hgru", "lru")
    first, second = results["models"]
    assert status == 1
    assert first["missing"] == "out of memory" and "tokens_per_second" not in first
    assert "missing" not in second and second["tokens_per_second"]["median"] > 0
    assert "wikitext103-hgrn, hgru: out of memory" in capsys.readouterr().out


def test_documents_are_cut_at_their_first_tokens(tmp_path, monkeypatch):
    seen = []

    class Watched(LanguageModel):
        def hidden(self, *given, reset=None, **options):
            seen.append(reset)
            return super().hidden(*given, reset=reset, **options)

    monkeypatch.setattr(training, "LanguageModel", Watched)
    run(tmp_path, "--document", "6")
    assert [reset.nonzero()[:, 1].tolist() for reset in seen] == len(seen) * [2 * [0, 6, 12]]
    seen.clear()
    run(tmp_path)
    assert seen and all(reset is None for reset in seen)


def test_a_profile_is_shown_and_a_failing_one_costs_no_speed(tmp_path, monkeypatch, capsys):
    profiles = iter([lambda: [Kernel("forward", 0, 300), Kernel("Memset (Device)", 300, 375)], lambda: 1 / 0])
    # as where there is CUDA
    monkeypatch.setattr("perf.kernels.profiled", lambda *rest: next(profiles)())
    measure = training.measure_training
    monkeypatch.setattr(
        "perf.commands.training.measure_training",
        lambda *rest, **named: measure(*rest, **{**named, "profile": True}),
    )
    status, results = run(tmp_path, "--mixers", "lru", "hgru")
    first, second = results["models"]
    assert status == 1
    assert first["profile"]["kinds"]["recurrence"]["share"] == 0.8
    assert second["profile"] == {"missing": "ZeroDivisionError: division by zero"}
    assert second["tokens_per_second"]["median"] > 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["recurrence", "80.0"] in shown and ["copies", "20.0"] in shown and ["idle", "0.0"] in shown
    assert ["wikitext103-hgrn,", "hgru:", "ZeroDivisionError:", "division", "by", "zero"] in shown


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("forward", "recurrence"),
        ("backward", "recurrence"),
        ("backward_0d1d2d3", "recurrence"),
        ("vectorized_layer_norm_backward_kernel", "elementwise and norms"),
        ("nvjet_hsh_192x192_64x3_2x1_v_bz_coopB_TNN", "matrix products"),
        ("nvjet_tst_128x64_64x8_1x2_h_bz_splitK_TNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x64x8_stage3_warpsize2x2x1_ffma",
            "matrix products",
        ),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "matrix products"),
        ("void gemmk1_kernel<int, float, 256, 5, false>", "matrix products"),
        ("triton_tem_fused_mm_t_4", "matrix products"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        (
            "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128>>",
            "attention",
        ),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x64", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", "attention"),
        # what prepares its arguments is elementwise
        ("triton_poi_fused__scaled_dot_product_flash_attention_transpose_3", "elementwise and norms"),
        ("triton_red_fused__to_copy_exp_max_sub_sum_12", "loss"),
        ("triton_poi_fused__to_copy_arange_clamp_div_eq_exp_gather_ne_scalar_tensor_select_17", "loss"),
        ("triton_red_fused__log_softmax_nll_loss_forward_5", "loss"),
        ("triton_red_fused_argmax_view_6", "loss"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>", "loss"),
        ("void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>", "loss"),
        # of HGRN's lower bounds, and of a complex number
        ("triton_poi_fused__softmax_add_cos_mul_neg_rsub_select_sigmoid_sin_6", "elementwise and norms"),
        ("triton_poi_fused_add_expand_mul_view_as_complex_11", "elementwise and norms"),
        ("triton_per_fused__to_copy_native_layer_norm_native_layer_norm_backward_9", "elementwise and norms"),
        ("triton_poi_fused_log_sigmoid_forward_view_3", "elementwise and norms"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
            "elementwise and norms",
        ),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "elementwise and norms"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::"
            "(anonymous namespace)::FusedOptimizerTensorListMetadata<3>, FusedAdamMathFunctor<float, 4>>",
            "optimiser",
        ),
        (
            "void at::native::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float>>",
            "optimiser",
        ),
        ("triton_for_fused_2", "optimiser"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("chunk_states", "recurrence"),
        ("gate_gradients", "recurrence"),
        ("short_conv", "recurrence"),
        ("triton_poi_fused_abs_add_clamp_div_exp_gate_loop_chunkwise_triton_14", "elementwise and norms"),
        ("triton_red_fused__to_copy_arange_cat_clamp_div_eq_exp_max_ne_scalar_tensor_select_2", "loss"),
        ("Memset (Device)", "copies"),
        ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<Policy900, false, long>", "rest"),
        ("compute_grad_weight", "rest"),
    ],
)
def test_kernels_are_told_apart_by_their_names(name, kind):
    assert kind_of(name) == kind and kind in KINDS


def test_a_profile_is_summed_up():
    kernels = [
        Kernel("nvjet_a", 250, 350),
        Kernel("forward", 100, 200),
        # side by side with the last one
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
    with pytest.raises(ValueError, match="must hold one at least; got none"):
        summary([], 1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--presets", "wikitext103-hgrm"], "did you mean 'wikitext103-hgrn'?"),
        (["--mixers", "gate_lop"], "did you mean 'gate_loop'?"),
        (["--profile"], "--profile is for CUDA"),
        (["--batch", "10", "--accumulate", "3"], "must divide `batch_size` = 10"),
        (["--length", "0"], "--length must be at least 1; got 0."),
        (["--document", "0"], "--document must be at least 1; got 0."),
    ],
)
def test_what_the_user_got_wrong_is_told_in_one_line(arguments, told, capsys, tmp_path):
    assert main(["training", "--device", "cpu", "--out", str(tmp_path), *arguments]) == 2
    message = capsys.readouterr().err
    assert told in message and message.count("\n") == 1
    assert not list(tmp_path.iterdir())
