#!/bin/sh
# Write manifests/base and manifests/unserved-namespaces from the chart with its default values: one source for both ways
# to install. The warning of unserved namespaces is a part of its own, because overlays name the served ones. The uninstall
# hook is left out, which only Helm runs.
# HELM names the program to use. With --check nothing is written, and the exit code is 1 when a file is out of date.
set -eu
cd "$(dirname "$0")/.."
check=${1:-}
rendered=$(mktemp)
trap 'rm -f "$rendered"' EXIT

render() {
    file=$1
    shift
    {
        echo "# Rendered from charts/kvstrata by manifests/render.sh. Do not edit."
        "${HELM:-helm}" template kvstrata charts/kvstrata --namespace kvstrata-system --no-hooks "$@" \
            | sed -e '/helm\.sh\/chart:/d' -e 's/managed-by: Helm$/managed-by: kustomize/' -e '/^# Source: /d' \
                -e 's/"\. Serve it with: helm upgrade .*/"; the overlay names the served ones")/'
    } > "$rendered"
    if [ "$check" = --check ]; then
        diff -u "$file" "$rendered"
    else
        cat "$rendered" > "$file"
    fi
}

render manifests/base/operator.yaml --set warnOfUnservedNamespaces=false
render manifests/unserved-namespaces/policy.yaml --show-only templates/unserved-namespaces.yaml
