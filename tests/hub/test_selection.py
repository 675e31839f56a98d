"""Which files of a repository make a model."""

import pytest

from edge_transformer.errors import ModelNotFoundError, UnsupportedModelError
from edge_transformer.hub.selection import check_tokenizer, choose_gguf, gguf_groups, side_files, single_weights_file

GGUFS = [
    "README.md",
    "Model-1B-Q4_K_M.gguf",
    "Model-1B-Q4_K_S.gguf",
    "model-1b.q8_0.gguf",
    "BF16/Model-1B-BF16-00001-of-00003.gguf",
    "BF16/Model-1B-BF16-00002-of-00003.gguf",
    "BF16/Model-1B-BF16-00003-of-00003.gguf",
    "mmproj-Model-1B-F16.gguf",
]


@pytest.mark.parametrize(
    ("selector", "files"),
    [
        ("Q4_K_M", ["Model-1B-Q4_K_M.gguf"]),
        ("q4_k_s", ["Model-1B-Q4_K_S.gguf"]),
        ("Q8_0", ["model-1b.q8_0.gguf"]),
        ("bf16", GGUFS[4:7]),
        ("Model-1B-Q4_K_M.gguf", ["Model-1B-Q4_K_M.gguf"]),
        ("BF16/Model-1B-BF16-00001-of-00003.gguf", GGUFS[4:7]),
    ],
)
def test_a_gguf_model_is_chosen_by_file_or_format(selector: str, files: list[str]) -> None:
    assert choose_gguf(GGUFS, selector, "org/name") == files


@pytest.mark.parametrize(
    "selector", [None, "Q4", "K_M", "F16", "Q5_0", "other.gguf", "BF16/Model-1B-BF16-00002-of-00003.gguf"]
)
def test_none_or_several_are_an_error_that_lists_what_there_is(selector: str | None) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        choose_gguf(GGUFS, selector, "org/name")
    for name in ("Model-1B-Q4_K_M.gguf", "model-1b.q8_0.gguf", "BF16/Model-1B-BF16-00001-of-00003.gguf"):
        assert f"\n  {name}" in str(caught.value)
    assert "mmproj" not in str(caught.value)
    assert "-00002-of-" not in str(caught.value).replace(repr(selector), "")


def test_one_gguf_needs_no_selector_and_parts_that_are_missing_are_asked_for() -> None:
    assert choose_gguf(["a.gguf", "mmproj-a.gguf"], None, "org/name") == ["a.gguf"]
    assert gguf_groups(["a-00001-of-00002.gguf"]) == {
        "a-00001-of-00002.gguf": ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]
    }


def test_pickled_weights_are_never_chosen() -> None:
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin.*safetensors or \.gguf"):
        choose_gguf(["config.json", "pytorch_model.bin"], None, "org/name")
    with pytest.raises(ModelNotFoundError, match="2 other files"):
        choose_gguf(["config.json", "README.md"], None, "org/name")


def test_side_files_are_those_that_are_read() -> None:
    names = ["config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"]
    others = ["README.md", "model.safetensors", "pytorch_model.bin", "original/params.json", "sub/config.json", "x.py"]
    assert side_files(names + others) == sorted(names)


def test_the_weights_file_without_an_index() -> None:
    assert single_weights_file(["model.safetensors", "consolidated.safetensors"], "r") == "model.safetensors"
    assert single_weights_file(["weights.safetensors", "sub/other.safetensors"], "r") == "weights.safetensors"
    with pytest.raises(ModelNotFoundError, match=r"a\.safetensors, b\.safetensors"):
        single_weights_file(["a.safetensors", "b.safetensors"], "r")


def test_a_lone_tokenizer_model_is_refused_before_weights_are_loaded() -> None:
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.model.*save_pretrained"):
        check_tokenizer(["config.json", "tokenizer.model"], "org/name")
