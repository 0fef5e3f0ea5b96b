"""Command lines that cannot be: one line of error, exit code 2, nothing printed or written."""

from __future__ import annotations

import shlex

import pytest

from mlx_llama import generate
from mlx_llama.bench import command as bench
from mlx_llama.chat import repl as chat
from mlx_llama.core.backends.selection import Backend
from mlx_llama.doctor import command as doctor
from mlx_llama.parity import command as parity
from mlx_llama.quantize import command as quantize
from mlx_llama.server import command as server

MAINS = {"bench": bench.main, "chat": chat.main, "doctor": doctor.main, "generate": generate.main}
MAINS |= {"parity": parity.main, "quantize": quantize.main, "server": server.main}
NEWS = {"parity": ("running", "("), "server": ("listening",)}
LONG = "word " * 600
# TOY: a model with a context of 256. Found before anything is loaded:
EARLY = """
bench TOY -p 0 | --prompt-tokens 0: must be at least 1
bench TOY -p 8,x | --prompt-tokens 'x': must be whole numbers
bench TOY -p 8,,9 | --prompt-tokens '': must be whole numbers
bench TOY -n 1 | --generate-tokens 1: must be at least 2
bench TOY -d -1 | --depth -1: must be at least 0
bench TOY -r 0 | --repetitions 0: must be at least 1
bench TOY -r 1,2 | --repetitions 1,2: must be one number
bench TOY -o xml | invalid choice: 'xml'
bench TOY -o csv --json | --json and --output csv contradict each other
bench TOY -c 3k | --ctx-size 3k
bench TOY -p 200 -n 57 | a prompt of 200 and 57 more tokens needs 257 positions
bench TOY -p 8 -n 64 -d 0,193 | tg64 @ d193 needs 257 positions and the context of
bench TOY -n 64 -d 37 -p 8 -c 100 | tg64 @ d37 needs 101 positions and the context of
bench TOY --plot x.jpg | --plot x.jpg: the name must end in .png, .svg or .pdf
bench TOY --plot no/such/folder/x.png | there is no folder no/such/folder
bench TOY -b 0 | --rows 0: must be at least 1
bench TOY -b 513 | --rows 513: must be at most 512
bench TOY -b two | --rows 'two'
bench TOY -b 2 -d 0 | --depth and --rows contradict each other
bench TOY -b 2 -p 200 -n 57 | needs 257 positions
bench TOY -b 2 -p 200 -n 57 | lower --prompt-tokens or --generate-tokens
bench TOY --profile --plot x.png | --profile and --plot contradict each other
bench TOY --profile --host | --profile and --host contradict each other
bench TOY --profile --compile | --profile and --compile contradict each other
bench TOY --profile -b 2 -p 8 | take no --prompt-tokens
bench TOY --profile -b 2 -d 250 | tg64 @ d250 needs 314 positions
bench --save | --save is for --kernels
bench --kernels --backend cpu --profile | --profile
bench --kernels --backend cpu -o csv | --output csv
bench --kernels --backend cpu --model x | --model
bench --kernels --backend mlx --device cpu | use --backend cpu
bench --cache-bits x | --cache-bits 'x': must be 8 or 16
bench --cache-memory 1GB | unrecognized arguments: --cache-memory
chat --cache-bits 32 | --cache-bits '32': must be 8 or 16
chat --cache-memory 0 | --cache-memory '0': must be a size
chat --max-rows 2 | unrecognized arguments: --max-rows
generate -p hi --cache-bits 4 | --cache-bits '4': must be 8 or 16
generate -p hi --cache-memory lots | --cache-memory 'lots': must be a size such as 2GB
generate --prompts TEXT -o out --max-rows 0 | --max-rows '0': must be a whole number, 1 to 512
generate -p hi --output x | --output is for --prompts
generate -p hi --max-rows 2 | --max-rows is for --prompts
generate --prompts none -o x | none: cannot be read
generate --prompts none | --prompts needs --output FILE
parity --cache-bits 4 | --cache-bits '4': must be 8 or 16
parity --record x.json --batch-invariant | --batch-invariant has no meaning with --record
server --port 99999 | --port '99999'
server --port x | --port 'x'
server --host no.such.host.invalid | cannot listen
server --timeout 0 | --timeout '0'
server --queue -1 | --queue '-1'
server --max-connections 0 | --max-connections '0'
server --parallel 0 | --max-rows '0'
server --template nope | neither a file
server --threads x | --threads
server --idle-unload never | --idle-unload 'never'
server --api-key-file /no/file | cannot be read
server --api-key schlüssel | ASCII
server --ssl-key-file x | needs both
server --temp -3 | option --temp
server --max-body big | --max-body 'big'
server --model no/such/folder | no such folder
"""
OTHERS = """
chat TOY --temp -1 --top-p 2 | option --temp
chat TOY --frob | unrecognized arguments: --frob
chat TOY --backend abacus | there is no backend 'abacus'
chat --model /nowhere | /nowhere
doctor --nope | --nope
doctor a b | unrecognized arguments: b
doctor --ctx-size many | --ctx-size 'many'
doctor --cache-bits 4 | --cache-bits '4': must be 8 or 16
doctor --cache-bits '' | --cache-bits ''
doctor --ctx-size 0 | --ctx-size 0
doctor --ctx-size | --ctx-size
doctor TOY guide | not allowed with
generate TOY -p hi --temp -3 --top-p 9 --seed x | option --temp: '-3'
generate TOY | arguments --prompt/-p --file/-f --prompts is required
generate TOY -p hi --backend tpu | no backend 'tpu'
generate TOY -p hi --device tpu | no device 'tpu'
generate TOY -p hi --backend cpu --device gpu | the cpu backend has no GPU
generate TOY -p hi --backend cpu --dtype float16 | computes in float32
generate TOY -p hi --dtype int8 | --dtype 'int8'
generate TOY -p hi --ctx-size 9k | 1 to 256
generate TOY -p LONG | the context holds 256
generate TOY -p hi --template nope | nope
generate TOY -p hi --chat-template '{% for %}' | template
generate TOY -p hi -sys x --ignore-chat-template | --system-prompt needs a chat template
generate TOY -p hi --threads 0 --model no/such/folder | --threads '0': must be a whole number, 1
parity TOY --backends tpu | --backends 'tpu': must be some of mlx, cpu, cuda
parity TOY --tokens 1 | --tokens '1': must be a whole number, 2 to 256
parity TOY --prompt '' | --prompt: 1 token is too few
parity TOY --prompt LONG --backends cpu | do not fit the context of 256: give --tokens
parity TOY --repeat 1 | --repeat '1': must be a whole number, 2 to 1000
parity TOY --stride 5 | --stride is for --perplexity
parity TOY --verify-cache --html x.html | --html has no meaning with --verify-cache
parity TOY --check x --prompt p | --prompt has no meaning with --check
parity TOY --record /nowhere/x --tokens 4 | /nowhere/x: cannot be written
parity TOY --record x --cache-bits 8 | --cache-bits has no meaning with --record
parity TOY --record x --dtype float16 | a trace is recorded at float32
parity TOY --html /nowhere/x --backends cpu --tokens 4 | --html /nowhere/x: cannot be written
parity TOY --perplexity /nowhere/t.txt | /nowhere/t.txt: cannot be read
parity TOY --perplexity - --backends cpu | -: has 1 tokens, a perplexity needs at least 2
parity TOY --perplexity - --ctx-size 10 --stride 10 | --stride '10': must be a whole number, 1 to 9
parity TOY --perplexity - --ctx-size 300 | --ctx-size '300': must be a whole number, 2 to 256
parity TOY --verify-cache --tokens 5 | --verify-cache needs at least 8 tokens
parity TOY --backends cpu --device gpu | the cpu backend has no GPU
parity TOY --batch 1 | --batch '1': must be a whole number, 2 to 256
parity TOY --batch 2,,3 | --batch ''
parity TOY --batch --tokens 7 | --batch needs at least 8 tokens
parity TOY --batch --html x | --html has no meaning with --batch
parity TOY --batch --repeat 2 | not allowed with argument
quantize IN | required: OUT
quantize IN OUT --bits 7 | --bits '7': MLX has 2, 3, 4, 5, 6, 8
quantize IN OUT --bits four | --bits 'four'
quantize IN OUT --group-size 16 | MLX has 32, 64, 128
quantize IN OUT --group-size 128 | does not divide the rows of any matrix
quantize IN OUT --format gguf | choose mlx, mlx:mxfp4, mlx:nvfp4, mlx:mxfp8, gguf:
quantize IN OUT --format mlx:mxfp4 --bits 4 | --bits 4: is for --format mlx
quantize IN OUT.gguf --format mlx:mxfp4 | --format mlx:mxfp4 writes a folder
quantize IN OUT.gguf --format gguf:MXFP4 | is for the matrices of experts
quantize IN OUT --format gguf:Q5_K | 'gguf:Q5_K'
quantize IN OUT --format gguf:Q8_0 | ends in .gguf
quantize IN OUT.gguf --format gguf:Q8_0 --bits 8 | --bits 8: is for --format mlx
quantize IN OUT.gguf --format gguf:Q8_0 --group-size 32 | --group-size 32: is for --format mlx
quantize nothing OUT | no such folder
quantize IN IN | exists already
quantize IN OUT --revision x | revision
quantize IN OUT --nope | --nope
quantize IN IN/config.json/OUT | cannot be written
quantize IN OUT --calibrate docs | --format gguf:IQ4_XS
quantize IN OUT.gguf --imatrix m.gguf --format gguf:Q8_0 | gguf:Q8_0
quantize IN OUT.gguf --imatrix no.gguf --format gguf:Q4_0 | no.gguf
quantize IN OUT.gguf --calibrate no.txt --format gguf:Q4_0 | no.txt
server --quiet --port 0 --ssl-key-file /no/a --ssl-cert-file /no/b | cannot be used
server --quiet --port 0 --ctx-size 9k | 1 to
server --quiet --port 0 --regex ( | option --regex
server --quiet --port 0 --logit-bias 999999=1 | option --logit-bias
"""


@pytest.mark.parametrize(
    "line, is_early",
    [(line, table is EARLY) for table in (EARLY, OTHERS) for line in table.strip().splitlines()],
)
def test_a_refusal_is_one_line(line, is_early, door, toy, tmp_path, monkeypatch):
    words, _, message = line.partition(" | ")
    name, *words = shlex.split(words.replace("TOY", f"--model {toy}").replace("IN", str(toy)))
    (tmp_path / "TEXT").write_text('{"prompt": "a"}')
    monkeypatch.chdir(tmp_path)
    if is_early:
        monkeypatch.setattr(Backend, "build", lambda *args, **named: pytest.fail("loaded"))
    done = door(MAINS[name], *(LONG if word == "LONG" else word for word in words))
    news = () if is_early else NEWS.get(name, ())
    (error,) = (text for text in done.err.splitlines() if not text.startswith(news))
    assert done.code == 2 and done.out == "" and error.startswith("error: ") and message in error
    assert [path.name for path in tmp_path.iterdir()] == ["TEXT"]
