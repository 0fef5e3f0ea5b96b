"""tekken.json as mistral-common and transformers read it; folders that have no other tokenizer."""

import base64
import json
import shutil
from pathlib import Path

import pytest
from cases.texts import conversation
from making import config_fields, make_checkpoint, random_tensors

from mlx_llama.core.errors import CheckpointError, ConfigError, TokenizerError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.text.hf_tokenizer import load_tokenizer
from mlx_llama.core.text.pre_tokenizers import PRE_TOKENIZERS
from mlx_llama.core.text.template import encode_messages
from mlx_llama.quantize.gguf_export import write_gguf
from mlx_llama.quantize.mlx_folder import write_mlx

TEXTS = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "  naïve café  \n\n\tdef f(x):\n    return x**2  # 12345",
    "ÉCOLE élève ᾳ 你好，世界 🙂🙂 ñandú \x00",
    "a" * 100,
    " " * 37 + "x\r\n\r\n",
    "[INST] is text, as is </s>",
    "I'll we've DON'T 3.14159",
]
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
VOCABULARY = 380


def make_tekken(path: Path, **changes) -> None:
    """Write a file of words that the tokenizers library finds in TEXTS, more than it uses."""
    import tokenizers
    from tokenizers import Regex, pre_tokenizers, trainers

    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    pattern = PRE_TOKENIZERS["tekken"][0]
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(TEXTS * 3, trainer)
    decoder = tokenizers.decoders.ByteLevel()
    # as bytes, which need not be a text
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    words = sorted(library.get_vocab().items(), key=lambda item: item[1])
    vocab = [
        {
            "rank": rank,
            "token_bytes": base64.b64encode(bytes(byte_of[c] for c in word)).decode(),
            "token_str": decoder.decode([word]),
        }
        for word, rank in words
    ]
    config = {"pattern": pattern, "num_vocab_tokens": len(vocab), "version": "v7"}
    config |= {"default_vocab_size": VOCABULARY, "default_num_special_tokens": 10}
    special = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(SPECIAL)]
    raw = {"config": config, "vocab": vocab, "special_tokens": special}
    path.write_text(json.dumps(raw | changes))


def load(folder: Path, vocabulary: int = VOCABULARY):
    return load_tokenizer(folder, LlamaConfig.from_dict(config_fields(vocab_size=vocabulary)))


def test_ids_are_those_of_transformers_conversion(tmp_path):
    conversion = pytest.importorskip("transformers.integrations.mistral.tokenizer")
    make_tekken(tmp_path / "tekken.json")
    tokenizer = load(tmp_path)
    judge = conversion.MistralConverter(str(tmp_path / "tekken.json")).converted()
    judge.encode_special_tokens = True
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == judge.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == judge.get_vocab_size() == VOCABULARY
    assert tokenizer.special_ids == {
        text: i for i, text in enumerate([*SPECIAL, *(f"<SPECIAL_{i}>" for i in range(6, 10))])
    }
    # BOS stands before a text, as in mistral-common's requests
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (1, (2,), True)
    assert tokenizer.encode("[INST]", add_bos=True, parse_special=True) == [1, 3]
    assert tokenizer.named["pad_token"] == "<pad>"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tekken_240718.json", "tekken_240911.json"])
def test_ids_of_mistrals_files_are_those_of_mistral_common(name, tmp_path):
    """Mistral Nemo's and Pixtral's files, which list no special tokens."""
    package = pytest.importorskip("mistral_common")
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    path = Path(package.__file__).parent / "data" / name
    shutil.copy(path, tmp_path / "tekken.json")
    tokenizer, judge = load(tmp_path, 131072), Tekkenizer.from_file(path)
    for text in TEXTS:
        assert tokenizer.encode(text) == judge.encode(text, bos=False, eos=False)
    assert (tokenizer.bos_id, tokenizer.vocab_size) == (judge.bos_id, judge.n_words)
    assert tokenizer.special_ids["[TOOL_CALLS]"] == judge.get_special_token("[TOOL_CALLS]")


def test_a_folder_with_tekken_json_alone_and_what_is_written_of_it(tmp_path):
    source = make_checkpoint(tmp_path / "in", vocab_size=VOCABULARY)
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        (source / name).unlink(missing_ok=True)
    make_tekken(source / "tekken.json")
    checkpoint = open_checkpoint(source)
    write_gguf(checkpoint, tmp_path / "out.gguf", "F32")
    write_mlx(checkpoint, tmp_path / "out", None)
    copies = open_checkpoint(tmp_path / "out.gguf"), open_checkpoint(tmp_path / "out")
    assert copies[0].gguf_metadata["tokenizer.ggml.pre"] == "tekken"
    for text in TEXTS:
        ids = checkpoint.tokenizer.encode(text, add_bos=True)
        assert ids[0] == 1
        assert all(copy.tokenizer.encode(text, add_bos=True) == ids for copy in copies)


@pytest.mark.parametrize("name", ["mistral-small-3.2", "devstral"])
@pytest.mark.parametrize("file", ["chat_template.json", "chat_template.jinja"])
def test_mistral_small_and_devstral_as_they_ship(file, name, tmp_path):
    """The text part of a model with images, tekken.json, and a template in a file beside it."""
    transformers = pytest.importorskip("transformers")
    conversion = pytest.importorskip("transformers.integrations.mistral.tokenizer")
    text = config_fields(architectures=["MistralForCausalLM"], vocab_size=VOCABULARY)
    tensors = {f"language_model.{name}": x for name, x in random_tensors(text).items()}
    source = make_checkpoint(
        tmp_path / "in",
        tokenizer=False,
        tensors=tensors,
        architectures=["Mistral3ForConditionalGeneration"],
        model_type="mistral3",
        text_config=text,
        vision_config={"hidden_size": 16},
    )
    make_tekken(source / "tekken.json")
    template = (Path(__file__).parents[2] / f"data/tool-templates/{name}.jinja").read_text("utf-8")
    is_json = file.endswith(".json")
    (source / file).write_text(json.dumps({"chat_template": template}) if is_json else template)
    checkpoint = open_checkpoint(source)
    assert checkpoint.config.is_text_part and file in checkpoint.template.name
    judge = transformers.PreTrainedTokenizerFast(
        tokenizer_object=conversion.MistralConverter(str(source / "tekken.json")).converted(),
        **dict(bos_token="<s>", eos_token="</s>", chat_template=template),
    )
    talk = conversation([("system", "Be brief."), ("user", "1 + 2?"), ("assistant", "3")])
    wanted = judge.apply_chat_template(talk, return_dict=False)
    write_gguf(checkpoint, tmp_path / "out.gguf", "F32")
    write_mlx(checkpoint, tmp_path / "out", 4)
    for path in (source, tmp_path / "out.gguf", tmp_path / "out"):
        read = open_checkpoint(path)
        assert encode_messages(read.tokenizer, read.template, talk) == wanted


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(config={}), "not a tekken.json .*pattern|not a tekken.json .*special"),
        (dict(vocab=[{"token_bytes": "?"}]), "not a tekken.json"),
        (dict(vocab=[{"token_bytes": "YQ=="}]), "not every byte is a token"),
        (dict(vocab=3), "not a tekken.json"),
        (dict(special_tokens=[{"rank": 1, "token_str": "<s>"}]), "10 special tokens, expected"),
        (dict(special_tokens=[{"rank": 0, "token_str": "<x>"}]), "not a tekken.json .*<s>"),
        (dict(vocab=[{"token_bytes": "A" * 2000}]), "a token has more than 1024 bytes"),
    ],
)
def test_a_malformed_file_is_named(changes, message, tmp_path):
    make_tekken(tmp_path / "tekken.json", **changes)
    with pytest.raises(TokenizerError, match=message) as caught:
        load(tmp_path)
    assert "tekken.json" in str(caught.value) and "\n" not in str(caught.value)


def test_mistrals_own_settings_and_names_are_refused(tmp_path):
    source = make_checkpoint(tmp_path / "in")
    (source / "model.safetensors").rename(source / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match="consolidated.safetensors, Mistral's own names"):
        open_checkpoint(source)
    (source / "config.json").rename(source / "params.json")
    with pytest.raises(ConfigError, match="params.json, Mistral's own settings"):
        open_checkpoint(source)
