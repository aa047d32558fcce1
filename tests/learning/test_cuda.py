import pytest
import torch

from linrec import mixers
from linrec.learning import build_learner
from linrec.models import LanguageModel, ModelConfig
from linrec.models.compilation import EAGER_STEPS
from linrec.trees import leaves

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("mixer", ["lru", "gate_loop", "min_gru", "hgru"])
@pytest.mark.parametrize("name", ["rtrl", "tbptt"])
@pytest.mark.parametrize("resets", [False, True])
def test_captured_chunks_are_the_chunks(mixer, name, resets):
    torch.manual_seed(0)
    args = {"gate_loop": {"n_heads": 8, "d_qk": 8}}.get(mixer, {})
    model = mixers.build(mixer, 8, **args).cuda()
    twin = mixers.build(mixer, 8, **args).cuda()
    twin.load_state_dict(model.state_dict())
    captured, eager = (
        build_learner(name, of, torch.optim.SGD(of.parameters(), lr=0.1), capture=capture)
        for of, capture in ((model, True), (twin, False))
    )
    for _ in range(EAGER_STEPS + 3):
        x, y, weight = torch.randn(3, 5, 8).cuda(), torch.randn(3, 5, 8).cuda(), torch.rand(3, 5).cuda()
        given = x, y, torch.rand(3, 5).cuda() < 0.3 if resets else None, weight
        found, expected = captured.chunk(*given), eager.chunk(*given)
        torch.testing.assert_close(found.prediction, expected.prediction)
        torch.testing.assert_close(found.loss, expected.loss)
        for mine, other in zip(leaves(captured.memory), leaves(eager.memory), strict=True):
            torch.testing.assert_close(mine, other)
    assert captured.updates == EAGER_STEPS + 3
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_results_of_a_replay_outlast_the_next():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab_size=5, d_model=8, n_layers=2, mixer="lru")).cuda()
    learner = build_learner("rtrl", model, capture=True)
    tokens = torch.randint(5, (EAGER_STEPS + 3, 2, 6)).cuda()
    steps = [learner.chunk(part[:, :-1], part[:, 1:]) for part in tokens]
    twin = build_learner("rtrl", model)
    for step, part in zip(steps, tokens, strict=True):
        torch.testing.assert_close(step.loss, twin.chunk(part[:, :-1], part[:, 1:]).loss)
    for name, gradient in twin.gradients().items():
        torch.testing.assert_close(learner.gradients()[name], gradient)
