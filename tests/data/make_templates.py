"""Write templates-llama-cpp.json.xz: what llama.cpp's own templates make of conversations.

    python tests/data/make_templates.py llama_cpp_python-0.3.36/vendor/llama.cpp

Compiles its src/llama-chat.cpp with g++. The file: {"conversations": [[[role, content], ...], ...],
"texts": {name: [[without, with the header of the answer], ...]}}.
"""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
import tempfile
from pathlib import Path

LLAMA_H = """
#pragma once
#include <cstddef>
#include <cstdint>
struct llama_chat_message { const char * role; const char * content; };
extern "C" int32_t llama_chat_builtin_templates(const char ** output, size_t len);
"""
MAIN = """
#include "llama-chat.h"
#include "llama.h"
#include <cstdio>
int main(int argc, char ** argv) {  // nothing: the names; else NAME 0|1 [ROLE CONTENT ...]
    if (argc == 1) {
        const char * names[1000];
        for (int i = 0, n = llama_chat_builtin_templates(names, 1000); i < n; i++) puts(names[i]);
        return 0;
    }
    std::vector<llama_chat_message> messages;
    for (int i = 3; i + 1 < argc; i += 2) messages.push_back({argv[i], argv[i + 1]});
    std::vector<const llama_chat_message *> chat;
    for (auto & message : messages) chat.push_back(&message);
    std::string text;
    auto name = llm_chat_template_from_str(argv[1]);
    if (llm_chat_apply_template(name, chat, text, *argv[2] == '1') < 0) return 1;
    fwrite(text.data(), 1, text.size(), stdout);
}
"""
CONVERSATIONS = [
    [["user", "  Hello "]],
    [
        ["system", " You are\na test. "],
        ["user", "Hello"],
        ["assistant", " I am here. \n"],
        ["user", " Who\nare you? "],
    ],
    [["user", "a"], ["user", " b"], ["assistant", "c "], ["system", "late"], ["user", "e"]],
    [["system", "s"], ["user", "x"], ["assistant", " y"], ["tool", " 7 "], ["user", "z"]],
]


def main(llama_cpp: str) -> None:
    source = Path(llama_cpp, "src")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "main")
        Path(folder, "llama.h").write_text(LLAMA_H)
        Path(folder, "main.cpp").write_text(MAIN)
        files = [f"{folder}/main.cpp", source / "llama-chat.cpp"]
        flags = ["-std=c++17", f"-I{folder}", f"-I{source}", "-o", program]
        subprocess.run(["g++", *flags, *files], check=True)

        def run(*words: str) -> str:
            done = subprocess.run([program, *words], check=True, capture_output=True)
            return done.stdout.decode()

        texts = {
            name: [
                [run(name, prompt, *sum(conversation, [])) for prompt in "01"]
                for conversation in CONVERSATIONS
            ]
            for name in run().split()
        }
    data = json.dumps({"conversations": CONVERSATIONS, "texts": texts}, ensure_ascii=False)
    path = Path(__file__).with_name("templates-llama-cpp.json.xz")
    path.write_bytes(lzma.compress(data.encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main(sys.argv[1])
