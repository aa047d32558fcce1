"""The page of the server in a browser, and what it shows of the layers."""

import pytest
import torch

from linrec.generation import generate
from linrec.lab.inspection import inspect_model
from linrec.serve import Engine
from linrec.serve.workbench import Watch
from linrec.text import ByteTokenizer
from tests.browser import browser_page, in_a_browser
from tests.generation.models import build

from .test_http import post, serving, tiny


@pytest.mark.parametrize("name", ["gate_loop", "hybrid"])
def test_the_layers_are_those_of_an_inspection(name):
    model = build(name)
    engine, watch = Engine(model), Watch(model)
    request = engine.submit([1, 2, 3], n_tokens=6, seed=2, observer=watch)
    other = engine.submit([4], n_tokens=9, seed=3)
    tokens = torch.tensor([[1, 2, 3, *request.result()]])
    other.result()
    shown = watch.tokens[request]
    assert len(shown) == 6
    layers = inspect_model(model, tokens)
    states = [model(tokens[:, :n])[1] for n in range(2, 9)]
    for place, found in enumerate(shown):
        for number, layer in enumerate(found):
            expected = layers[number].magnitude
            # the first step that is watched has no step before it
            if place > 0 and expected is not None:
                of_step = expected if expected.dim() == 1 else expected[0, 2 + place]
                assert layer["decay"] == pytest.approx(of_step.mean().item(), abs=1e-6)
    if name == "gate_loop":
        (now,), (before,) = ([state[0]] for state in (states[3], states[2]))
        pair = [torch.view_as_real(each) if each.is_complex() else each for each in (now, before)]
        assert shown[2][0]["moved"] == pytest.approx(((pair[0] - pair[1]).norm() / pair[0].norm()).item())
        assert shown[2][0]["size"] == pytest.approx(pair[0].square().mean().sqrt().item())


def test_answers_are_the_clients_own():
    with serving(keys=["one", "two"]) as (url, _):
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        status, made = post(url, {"prompt": "a"}, "/linrec/answers", **one)
        assert status == 200
        assert post(url, {"seed": 1}, f"/linrec/answers/{made['id']}/fork", **two)[0] == 404
        assert post(url, {"prompt": "a"}, "/linrec/answers")[0] == 401
        status, found = post(url, {"n_tokens": 9999}, f"/linrec/answers/{made['id']}/rollback", **one)
        assert status == 400 and "`n_tokens`" in found["error"]["message"]
        assert post(url, {"prompt": "a", "n": 2}, "/linrec/answers", **one)[0] == 400


class TestPage:
    pytestmark = in_a_browser

    @pytest.mark.parametrize("width", [1280, 400])
    def test_text_streams_and_is_forked_and_taken_back(self, width, tmp_path):
        with serving(Engine(tiny(), slots=4)) as (url, engine), browser_page() as (page, complaints):
            page.set_viewport_size({"width": width, "height": 900})
            page.goto(url)
            page.fill("#prompt", "To be")
            page.fill("#tokens", "40")
            page.fill("#temperature", "1")
            page.fill("#seed", "3")
            page.click("text=Continue")
            page.wait_for_selector("text=ended: length")
            tokens = generate(
                engine.model, torch.tensor([list(b"To be")]), n_tokens=40, seed=3, vocab_size=257
            )
            expected = "To be" + ByteTokenizer().decode(tokens.tokens[0].tolist())
            assert page.text_content(".text") == expected
            assert page.locator("tbody tr").count() == 1 and "GLA" in page.text_content("tbody")
            page.click(".fork")
            page.wait_for_function("document.querySelectorAll('.answer').length === 2")
            page.locator(".answer").nth(1).locator(".back").click()
            page.wait_for_selector("text=of which 4 were read before; ended: length")
            assert page.locator("tbody tr").count() == 2
            # the same seed gives the same tokens again
            assert page.locator(".text").nth(1).text_content() == expected
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            page.locator(".text span").first.hover()
            page.screenshot(path=tmp_path / f"{width}.png", full_page=True)
            assert not [said for said in complaints if not said.startswith(url)]
