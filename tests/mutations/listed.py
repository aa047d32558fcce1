"""Mistakes in the source, each of which `make test` must notice."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """A mistake, made by replacing a piece of one file.

    Attributes:
        file: a file below `src/linrec`.
        old: the piece, which stands in the file exactly once.
        new: the mistake.
        breaks: what the mistake breaks.
        tests: the tests to run first, as arguments of pytest.
    """

    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]


LAWS = "tests/test_laws.py"
# without a GPU, kernels run there
INTERPRETER = "tests/test_interpreter.py"
LEARNERS = "tests/learning/test_learners.py"

MUTATIONS = (
    Mutation(
        "ops/gate_loop/reference.py",
        "a[:, n, :, :, None] * state + update",
        "a[:, n, :, :, None] * (state + update)",
        "reference: the newest input decays too",
        (LAWS, "-k", "float64_reference and gate_loop"),
    ),
    Mutation(
        "ops/scan/torch.py",
        "through = a_t * through",
        "through = a_t * 1",
        "torch scan: the decay of a block is its last step's",
        (LAWS, "-k", "float64_reference and scan"),
    ),
    Mutation(
        "ops/gate_loop/torch.py",
        "before = torch.cat([state[:, None], after[:, :-1]], dim=1)",
        "before = torch.cat([state[:, None], after[:, 1:]], dim=1)",
        "torch chunkwise: a chunk reads the state after it, from the second chunk on",
        (LAWS, "-k", "float64_reference and gate_loop-chunkwise-torch"),
    ),
    Mutation(
        "ops/scan/torch.py",
        "carry = value = torch.addcmul(x_t, a_t, _cleared(carry, cut_t))",
        "carry = value = torch.addcmul(x_t, a_t, carry)",
        "torch scan: NaN passes a reset",
        (LAWS, "-k", "nothing_passes_a_reset and scan"),
    ),
    Mutation(
        "ops/delta_rule/torch.py",
        "state = kept + keys_c.mT @ corrected[-1]",
        "state = kept + keys_c.mT @ U_c",
        "torch delta rule: what a chunk writes is not corrected by the state before it",
        (LAWS, "-k", "float64_reference and delta_rule"),
    ),
    Mutation(
        "ops/kernels/elementwise/numba.py",
        "t_before = zero if stop == time else t + one if reverse else t - one",
        "t_before = zero if stop == time else t - one",
        "Numba scan: the gradient of the decay in reversed time reads the wrong step",
        (LAWS, "-k", "under_options and scan-recurrent-numba"),
    ),
    Mutation(
        "ops/kernels/matrix/numba.py",
        "dstate[row, head, c, lo + j] = G[c, j]",
        "dstate[row, head, c, lo + j] = -G[c, j]",
        "Numba matrix states: the sign of the initial state's gradient",
        (LAWS, "-k", "float64_reference and numba"),
    ),
    Mutation(
        "ops/kernels/selective/numba.py",
        "w[i, n, c] = a[i, n, c] * h[n, c]",
        "w[i, n, c] = h[n, c]",
        "Numba selective scan: the adjoint makes states again without their decay",
        (LAWS, "-k", "float64_reference and selective_scan"),
    ),
    Mutation(
        "ops/kernels/matrix/triton.py",
        "chunk = CHUNKS - 1 - i if REVERSE else i\n        if not LOCAL:",
        "chunk = i\n        if not LOCAL:",
        "Triton chunkwise: gradients of states are carried forward in time",
        ("tests/ops/test_gate_loop_chunkwise_triton.py", INTERPRETER),
    ),
    Mutation(
        "ops/kernels/elementwise/scan_triton.py",
        "a = tl.where(cut, 0.0, a)\n",
        "a = tl.where(cut, 1.0, a)\n",
        "Triton scan: a reset keeps the state",
        ("tests/ops/test_scan_triton.py", INTERPRETER),
    ),
    Mutation(
        "ops/short_conv/torch.py",
        "inputs[:, inputs.shape[1] - past :].to(state.dtype, copy=True)",
        "inputs[:, :past].to(state.dtype, copy=True)",
        "short convolution: the state holds the oldest inputs",
        (LAWS, "-k", "float64_reference and short_conv"),
    ),
    Mutation(
        "ops/attention/cache.py",
        "max(0, cache.k.shape[1] - (window - 1))",
        "max(0, cache.k.shape[1] - (window - 2))",
        "attention: the cache of a window is one step short",
        ("tests/ops/test_attention.py",),
    ),
    Mutation(
        "ops/core/precision.py",
        "    torch.bfloat16: torch.float32,\n",
        "    torch.bfloat16: torch.bfloat16,\n",
        "precision: states and sums of bfloat16 inputs are bfloat16",
        (LAWS, "-k", "every_dtype and scan"),
    ),
    Mutation(
        "ops/core/kernel.py",
        "out = tuple(flat[lead].new_empty(space.shape, dtype=space.dtype) for",
        "out = tuple(flat[lead].new_empty(space.shape) for",
        "torch.compile: fake kernels give every output the dtype of the inputs",
        (LAWS, "-k", "every_dtype and scan-recurrent-numba"),
    ),
    Mutation(
        "ops/core/loop.py",
        "ROUNDS = 27",
        "ROUNDS = 6",
        "torch.export: programs are wrong from 512 steps on",
        ("tests/ops/test_recurrence.py",),
    ),
    Mutation(
        "mixers/slstm.py",
        "FORGET_BIAS = (5.0, -7.0)",
        "FORGET_BIAS = (5.0, -5.0)",
        "sLSTM: the initial forget gates",
        ("tests/mixers/test_slstm.py",),
    ),
    Mutation(
        "nn/slstm_steps/torch.py",
        "log_i, f, z, o = gates",
        "log_i, f, o, z = gates",
        "sLSTM: the order of the gates",
        ("tests/mixers/test_slstm.py",),
    ),
    Mutation(
        "mixers/rwkv4.py",
        "before = before.masked_fill(reset[..., None], 0)",
        "before = before + 0",
        "RWKV-4: the bonus term reads the state before a reset",
        (LAWS, "-k", "laws_of_mixers and rwkv4"),
    ),
    Mutation(
        "mixers/lru.py",
        "return torch.log(nu), torch.log(max_phase * u_2",
        "return torch.log(2 * nu), torch.log(max_phase * u_2",
        "LRU: the initial radii",
        ("tests/mixers/test_lru.py",),
    ),
    Mutation(
        "nn/mixer.py",
        "if reset is not None and reset.shape != x.shape[:2]:",
        "if reset is not None and reset.shape[-1] != x.shape[1]:",
        "mixers: a reset of one row is broadcast over the batch",
        ("tests/mixers/test_interface.py", "-k", "reset"),
    ),
    Mutation(
        "testing/laws.py",
        "assert_agree(function(changed)[0][:, :n], y[:, :n], what)",
        "assert_agree(function(changed)[0][:, : n - 1], y[:, : n - 1], what)",
        "laws: a look at the next step passes for causal",
        ("tests/test_testing.py",),
    ),
    Mutation(
        "lab/train/checkpoint.py",
        "            set_random(state)\n",
        "            pass\n",
        "resume: torch's random state is not that of the checkpoint",
        ("tests/lab/train/test_resume.py",),
    ),
    Mutation(
        "lab/train/data.py",
        "for batch in range(start, len(self)):",
        "for batch in range(len(self)):",
        "resume: an epoch begins again with its first batch",
        ("tests/lab/train/test_resume.py",),
    ),
    Mutation(
        "lab/tasks/synthetic.py",
        'self._train(self._taken_by("test", "validation"), epoch=None, seed=0)',
        'self._train(self._taken_by("test"), epoch=None, seed=0)',
        "tasks: training samples are among those that validate",
        ("tests/lab/tasks/test_synthetic.py",),
    ),
    Mutation(
        "lab/train/config.py",
        "if isinstance(value, list):\n        return tuple(",
        "if isinstance(value, list):\n        return list(",
        "configuration: a stored tuple comes back as a list",
        ("tests/lab/train/test_config.py",),
    ),
    Mutation(
        "cli/dispatch.py",
        "except (ConfigError, DataError, RunFolderError) as error:\n        return _say(error, 2)",
        "except (ConfigError, DataError, RunFolderError) as error:\n        return _say(error, 1)",
        "command line: the exit status of what the user got wrong",
        ("tests/test_cli.py",),
    ),
    Mutation(
        "convert/layout.py",
        "taps[:, 0].flip(-1)",
        "taps[:, 0]",
        "converters: taps in the order of torch's convolution",
        ("tests/convert/test_mamba2.py",),
    ),
    Mutation(
        "generation/state_file.py",
        'tensors["reset"] = state.reset',
        'tensors["reset"] = ~state.reset',
        "generation: a stored state forgets, or does not forget, what came before its newest token",
        ("tests/generation/test_state_file.py",),
    ),
    Mutation(
        "learning/frozen_rls.py",
        "P = (P - k @ Px.T) / self.forgetting",
        "P = P - k @ Px.T / self.forgetting",
        "frozen_rls: the readout forgets nothing",
        ("tests/learning/test_frozen_rls.py",),
    ),
    Mutation(
        "lab/style.py",
        "statistics.stdev(values)",
        "statistics.pstdev(values)",
        "reports: the spread over seeds is of a population",
        ("tests/lab/test_style.py", "src/linrec/lab/style.py"),
    ),
    Mutation(
        "files.py",
        "partial.unlink(missing_ok=True)\n        raise",
        "os.replace(partial, path)\n        raise",
        "files: after an error, half a file stands at the path",
        ("tests/test_files.py",),
    ),
    Mutation(
        "learning/windows.py",
        "super().learn(piece, self.first_memory(len(piece.inputs), piece.inputs.device))",
        "super().learn(piece, memory)",
        "bptt: a sequence starts from the last state of the sequence before",
        (
            LEARNERS,
            "-k",
            "bptt_is",
        ),
    ),
    Mutation(
        "learning/windows.py",
        "(step // self.window + 1) * self.window",
        "(step // self.window + 2) * self.window",
        "tbptt: a window ends a window later",
        (
            LEARNERS,
            "-k",
            "tbptt_is",
        ),
    ),
    Mutation(
        "learning/rtrl.py",
        "factor[:, owner] * held[name] + influence",
        "factor[:, owner] * held[name] - influence",
        "rtrl: the sign of the influence of the present chunk",
        (
            LEARNERS,
            "-k",
            "elementwise",
        ),
    ),
    Mutation(
        "learning/rtrl.py",
        'torch.einsum("bnm,bm...->bn...", J, held)',
        'torch.einsum("bmn,bm...->bn...", J, held)',
        "dense_rtrl: the Jacobian is transposed",
        (
            LEARNERS,
            "-k",
            "dense_rtrl_is",
        ),
    ),
    Mutation(
        "learning/rtrl.py",
        "(errors[layer.path].conj()[:, owner] * held[name]).real",
        "(errors[layer.path][:, owner] * held[name]).real",
        "online_lru, full: the error of a complex state is not conjugated",
        (
            LEARNERS,
            "-k",
            "modes and full",
        ),
    ),
    Mutation(
        "learning/rtrl.py",
        '"full_rec": _Mode(traced=LRU_PARAMETERS[:3])',
        '"full_rec": _Mode(traced=LRU_PARAMETERS[:2])',
        "online_lru, full_rec: gamma has no trace",
        (
            LEARNERS,
            "-k",
            "modes and full_rec",
        ),
    ),
    Mutation(
        "learning/layers.py",
        "h[:, :-1]], 1).detach()",
        "h[:, 1:]], 1).detach()",
        "online_lru, 1truncated: the same step reads a later state",
        (
            LEARNERS,
            "-k",
            "modes and 1truncated",
        ),
    ),
    Mutation(
        "learning/rtrl.py",
        '"spatial": _Mode(fixed=LRU_PARAMETERS[:2])',
        '"spatial": _Mode(fixed=LRU_PARAMETERS[:1])',
        "online_lru, spatial: the phases learn",
        (
            LEARNERS,
            "-k",
            "modes and spatial",
        ),
    ),
    Mutation(
        "learning/rtrl.py",
        '"reservoir": _Mode(fixed=LRU_PARAMETERS)',
        '"reservoir": _Mode(fixed=LRU_PARAMETERS[:3])',
        "online_lru, reservoir: B learns",
        (
            LEARNERS,
            "-k",
            "modes and reservoir",
        ),
    ),
    Mutation(
        "learning/layers.py",
        "return of_weights[0], found[0][1]\n",
        "return of_weights[0], torch.ones_like(found[0][1])\n",
        "focused_backpropagation: traces do not decay",
        (
            LEARNERS,
            "-k",
            "focused",
        ),
    ),
    Mutation(
        "learning/rtrl.py",
        "(slice(mixer.d_model, 2 * mixer.d_model),)",
        "(slice(0, mixer.d_model),)",
        "lstm_1997: the traces are of h in place of the cell",
        (
            LEARNERS,
            "-k",
            "1997",
        ),
    ),
    Mutation(
        "mixers/ind_rnn.py",
        "self.bound).detach() + (u - u.detach())",
        "self.bound)",
        "ind_rnn: no gradient passes the clip",
        ("tests/mixers/test_ind_rnn.py",),
    ),
    Mutation(
        "ops/scan/torch.py",
        "_before(given, y, sums), cut) + wide(d.x)",
        "_before(given, y, sums), cut) - wide(d.x)",
        "scan: the sign of the input's tangent",
        (
            LAWS,
            "-k",
            "derivatives_where and scan",
        ),
    ),
)
