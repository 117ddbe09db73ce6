"""What may never have been on the way, whatever the end: read off everything that the API server ever held."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstrata.contract.policy.cache_view import reads_of
from kvstrata.contract.policy.keyspace import derive_keyspace
from kvstrata.model.pods import keys_in
from kvstrata.objects import labels, names
from tests.support.memory_api.objects import Event, Raw, Slot
from tests.support.objects import NAMESPACE

from .normal import data_keys, domain_key, own_scopes, read_bundle

PHASES = ("Pending", "Rolling", "AwaitingAcks", "Complete", "Failed")


@dataclass(slots=True)
class Effects:
    """How often something happened that must happen once."""

    epochs: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """By scope, every epoch that it ever had, in their order."""
    material: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """By Secret that the operator generates, every value that it ever had."""
    made: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """By object, every UID that it ever had."""
    templates: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """By Deployment or StatefulSet, every pod template that it ever had: one more is one more rollout."""
    intents: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """By invalidation, every set of scopes that it ever meant to roll."""
    phases: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """By invalidation, every phase that it ever was in."""
    data_keys: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """By epoch, every data key that it ever had."""

    def counts(self) -> dict[str, int]:
        """Return the number of each effect that has to be the same in every run."""
        parts = {
            "epochs": self.epochs, "material": self.material, "made": self.made, "intents": self.intents
        }  # fmt: skip
        for epoch, keys in self.data_keys.items():
            assert len(keys) == 1, f"epoch {epoch} had {len(keys)} data keys"
        return {f"{part} of {name}": len(values) for part, found in parts.items() for name, values in found.items()}

    def rollouts(self) -> dict[str, int]:
        """Return how many pod templates each workload went through."""
        return {name: len(values) for name, values in self.templates.items()}


def replay(start: Mapping[Slot, Raw], history: list[Event], *, by_hand: bool = False) -> Effects:
    """Go through all that happened since `start`, and assert what must hold at every moment.

    `by_hand` says that somebody damaged a bundle on purpose, so that not every moment has a whole one.
    """
    objects: dict[Slot, Raw] = dict(start)
    effects = Effects()
    roots: dict[str, tuple[int, int]] = {}
    keyspaces: set[str] = set()
    for raw in start.values():
        _note(effects, raw)
    _learn(effects, objects, keyspaces)
    for verb, raw in history:
        slot = (raw["kind"], raw["metadata"]["namespace"], raw["metadata"]["name"])
        if verb == "DELETED":
            objects.pop(slot, None)
            continue
        objects[slot] = raw
        _note(effects, raw)
        _learn(effects, objects, keyspaces)
        _check_keys(objects, raw, by_hand=by_hand)
        model = (raw["metadata"].get("labels") or {}).get(labels.MODEL)
        if not by_hand and model and raw["metadata"]["labels"].get(labels.COMPONENT) == "bundle":
            _check_bundle(objects, raw, model, roots, keyspaces)
    for scope, epochs in effects.epochs.items():
        assert len(epochs) == len(set(epochs)), f"an epoch of {scope} came back"
    for name, phases in effects.phases.items():
        assert phases == sorted(phases, key=PHASES.index), f"CacheInvalidation {name} went back: {phases}"
    return effects


def _note(effects: Effects, raw: Raw) -> None:
    kind, metadata = raw["kind"], raw["metadata"]
    name = f"{kind}/{metadata['name']}"
    component = metadata.get("labels", {}).get(labels.COMPONENT) if kind == "Secret" else None
    part_of_bundle = component in ("bundle", "data-keys")
    if component == "data-keys":
        for epoch, value in (raw.get("data") or {}).items():
            _append(effects.data_keys[epoch], value)
    if not part_of_bundle and kind != "Event":
        _append(effects.made[name], metadata["uid"])
    for number, (scope, epoch) in enumerate(own_scopes(raw)):
        _append(effects.epochs[f"next of {scope}" if number else str(scope)], epoch)
    if kind in ("Deployment", "StatefulSet"):
        _append(effects.templates[name], str(raw["spec"]["template"]))
    if kind == "Secret" and not part_of_bundle:
        _append(effects.material[name], str(sorted(raw.get("data", {}).items())))
    if kind == "CacheInvalidation":
        status = raw.get("status") or {}
        if status.get("scopes"):
            _append(effects.intents[name], str(status["scopes"]))
        _append(effects.phases[name], status.get("phase") or "Pending")


def _append(values: list[str], value: str) -> None:
    if not values or values[-1] != value:
        values.append(value)


def _learn(effects: Effects, objects: Mapping[Slot, Raw], keyspaces: set[str]) -> None:
    """Add the keyspace of every epoch that was ever in a status."""
    key = domain_key(objects)
    if key is None:
        return
    for raw in objects.values():
        for scope, epoch in own_scopes(raw):
            keyspaces.add(derive_keyspace(key, scope, epoch))


def _check_keys(objects: Mapping[Slot, Any], raw: Raw, *, by_hand: bool) -> None:
    """At any moment what a bundle encrypts with is in a Secret: whoever leads next must find it there."""
    if raw["kind"] != "Secret" or by_hand:
        return
    stored = set(data_keys(objects).values())
    for kind, _, name in objects:
        found = read_bundle(objects, name) if kind == "CachedModel" else None
        used = keys_in(found.entries, found.pools) if found else set()
        assert used <= stored, f"a key of the bundle of {name} is in no Secret any more"


def _check_bundle(
    objects: Mapping[Slot, Any], raw: Raw, model: str, roots: dict[str, tuple[int, int]], keyspaces: set[str]
) -> None:
    """At any moment a gate reads a whole bundle, of a higher revision than before, with epochs that cannot be lost."""
    found = read_bundle(objects, model)
    if found is None or raw["metadata"]["name"] != names.bundle_root(model):
        return
    root = found.root
    revision, term = roots.get(root.model_uid, (0, 0))
    assert root.revision > revision, "a bundle went back, or was committed twice"
    assert root.term >= term, "a bundle was committed with an older term"
    roots[root.model_uid] = (root.revision, root.term)
    unknown = {e.tenant for e in found.entries.values() if e.keyspace not in keyspaces}
    unknown |= {n for n, pool in found.pools.items() for v in pool.versions if v.keyspace not in keyspaces}
    assert not unknown, f"keyspaces of {unknown} come from epochs that nobody wrote down"
    warming = {v.keyspace for pool in found.pools.values() for v in pool.versions if not v.published}
    assert not warming & {one for read in reads_of(found).values() for one in read}, "somebody reads what is not warm"
    assert raw["metadata"]["namespace"] == NAMESPACE
