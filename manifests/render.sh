#!/bin/sh
# Write manifests/base/operator.yaml from the chart with its default values: one source for both ways to install. It has
# no warning of unserved namespaces: overlays name the served ones in a variable, which a policy cannot read. Nor has it the
# uninstall hook, which only Helm runs.
# HELM names the program to use. With --check nothing is written, and the exit code is 1 when the file is out of date.
set -eu
cd "$(dirname "$0")/.."
file=manifests/base/operator.yaml
rendered=$(mktemp)
trap 'rm -f "$rendered"' EXIT
{
    echo "# Rendered from charts/kvstrata by manifests/render.sh. Do not edit."
    "${HELM:-helm}" template kvstrata charts/kvstrata --namespace kvstrata-system --no-hooks --set warnOfUnservedNamespaces=false \
        | sed -e '/helm\.sh\/chart:/d' -e 's/managed-by: Helm$/managed-by: kustomize/' -e '/^# Source: /d'
} > "$rendered"
if [ "${1:-}" = --check ]; then
    diff -u "$file" "$rendered"
else
    cat "$rendered" > "$file"
fi
