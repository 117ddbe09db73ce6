"""The life of passwords: no server ever lacks the one that is used, whoever dies, restarts or reads late."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.model.redis.credentials import ServerCredentials, Stage
from kvstrata.objects import names
from kvstrata.objects.redis import passwords
from kvstrata.objects.redis.passwords import password_facts
from kvstrata.objects.redis.users import ADMIN_USER, DATA_USER, MARKER_PREFIX, user_words
from kvstrata.plan.actions import Order
from kvstrata.plan.redis.passwords import OVERLAP_S, ROTATE_EVERY_S, SETTLE_S, next_step, password_finding
from tests.support.amounts import examples

from .rotations import DOMAIN, KUBELET_S, SERVERS, START, Killed, Tier, rotate


class TestARotation:
    def test_ends_with_new_passwords_on_every_server_and_without_the_old_ones(self) -> None:
        tier = Tier()
        before = dict(tier.secret)
        for _ in rotate(tier):
            pass
        for key in (names.PASSWORD_KEY, names.ADMIN_PASSWORD_KEY, names.REPLICATION_PASSWORD_KEY):
            assert tier.secret[key] != before[key]
        for server in tier.servers.values():
            assert server.admits(DATA_USER, tier.secret[names.PASSWORD_KEY].decode())
            assert not server.admits(DATA_USER, before[names.PASSWORD_KEY].decode())
            assert not server.admits(ADMIN_USER, before[names.ADMIN_PASSWORD_KEY].decode())
            assert server.master == tier.secret[names.REPLICATION_PASSWORD_KEY].decode()
        assert set(tier.secret) == set(before)

    def test_never_lets_a_pod_or_a_replica_be_refused_however_late_it_reads(self) -> None:
        tier = Tier()
        assert [tier.refused() for _ in rotate(tier)].count([]) > 3
        tier = Tier()
        assert all(at.refused() == [] for at in rotate(tier))

    def test_uses_the_following_passwords_only_when_files_have_had_time_to_reach_every_pod(self) -> None:
        tier = Tier()
        staged_at = promoted_at = retired_at = START
        for at in rotate(tier):
            if at.facts.stage is Stage.STAGED:
                staged_at = max(staged_at, at.changed_at)
            if at.facts.stage is Stage.OVERLAP:
                promoted_at = at.changed_at
        retired_at = tier.changed_at
        assert (promoted_at - staged_at).total_seconds() >= SETTLE_S > KUBELET_S
        assert (retired_at - promoted_at).total_seconds() >= OVERLAP_S > KUBELET_S

    def test_is_not_begun_twice_for_one_wish(self) -> None:
        tier = Tier()
        for _ in rotate(tier):
            pass
        secret = dict(tier.secret)
        tier.pass_s(10 * OVERLAP_S)
        tier.run()
        assert tier.secret == secret

    def test_begins_by_itself_when_passwords_are_old_and_not_before(self) -> None:
        tier = Tier()
        tier.pass_s(ROTATE_EVERY_S - 1)
        tier.run()
        assert tier.facts.stage is Stage.CURRENT
        tier.pass_s(1)
        tier.run()
        assert tier.facts.stage is Stage.STAGED


def effects() -> int:
    """How many effects a rotation has."""
    tier, count = Tier(), 0
    tier.asked = "now"
    tier.alive_for = 1000
    for _ in rotate(tier):
        assert tier.alive_for is not None
        count = 1000 - tier.alive_for
    return count


@pytest.mark.parametrize("number", range(12))
def test_an_operator_that_is_killed_before_any_effect_of_a_rotation_goes_on_with_it(number: int) -> None:
    assert effects() == 12, "as many as the parameters say"
    tier = Tier()
    tier.alive_for = number
    with pytest.raises(Killed):
        assert all(at.refused() == [] for at in rotate(tier))
    # Another one begins to lead; it knows the Secret and what servers say, and no more.
    wish = tier.asked
    for at in rotate(tier):
        tier.asked = wish
        assert at.refused() == []
    assert tier.facts.stage is Stage.CURRENT
    assert all(
        set(server.words) == set(user_words(tier.secret[names.ACL_FILE_KEY])) for server in tier.servers.values()
    )


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("restart", "down", "up", "wish", "kill", "wait", "wait", "wait")),
        st.integers(0, 11),
    ),
    max_size=40,
)


@given(EVENTS, st.integers(0, 100))
@settings(max_examples=examples(60))
def test_whatever_happens_no_server_that_was_looked_at_refuses_and_all_ends_well(
    events: list[tuple[str, int]], seed: int
) -> None:
    tier = Tier(seed)
    for event, number in events:
        server = tier.servers[SERVERS[number % len(SERVERS)]]
        match event:
            case "restart":
                server.up = True
                server.start()
            case "down":
                server.up = False
            case "up" if not server.up:
                server.up = True
                server.start()
            case "wish":
                tier.asked = f"wish {number}"
            case "kill":
                tier.alive_for = number
            case "wait":
                tier.pass_s(10.0 * (number + 1))
        try:
            tier.run()
        except Killed:
            continue
        tier.alive_for = None
        assert tier.refused() == []
    for server in tier.servers.values():
        if not server.up:
            server.up = True
            server.start()
    tier.alive_for = None
    for _ in rotate(tier):
        pass
    assert tier.refused() == []
    finding = password_finding(tier.case(), next_step(tier.case()))
    assert (finding.status, finding.reason) == ("True", "PasswordsSet")


class TestServers:
    def test_one_that_started_with_an_older_file_is_told(self) -> None:
        tier = Tier()
        older = dict(tier.secret)
        for at in rotate(tier):
            if at.facts.stage is Stage.OVERLAP:
                break
        server = tier.servers["two"]
        server.file = older
        server.start()
        assert tier.refused() == ["two"]
        step = next_step(tier.case())
        assert step is not None
        assert step.orders == {"two": (Order.SET_USERS,)}
        finding = password_finding(tier.case(), step)
        assert (finding.status, finding.reason) == ("False", "SettingUsers")
        assert "two" in finding.message
        tier.run()
        assert tier.refused() == []

    @pytest.mark.parametrize("change", ["marker", "more", "nopass", "off"])
    def test_one_whose_users_somebody_changed_is_told(self, change: str) -> None:
        tier = Tier()
        words, marker = tier.servers["one"].words, tier.facts.marker
        match change:
            case "marker":
                del words[marker]
            case "more":
                words[DATA_USER] += ("#" + "0" * 64,)
            case "nopass":
                words["default"] = ("on", "nopass", "+@all")
            case "off":
                words[DATA_USER] = tuple(word for word in words[DATA_USER] if word != "on")
        step = next_step(tier.case())
        assert step is not None
        assert step.orders == {"one": (Order.SET_USERS,)}

    def test_one_that_does_not_answer_holds_a_rotation_up_and_is_named(self) -> None:
        tier = Tier()
        tier.servers["three"].up = False
        tier.asked = "now"
        step = next_step(tier.case())
        assert step is not None
        assert (step.orders, step.turn) == ({}, None)
        finding = password_finding(tier.case(), step)
        assert (finding.status, finding.reason) == ("False", "PasswordsOverdue")
        assert "three" in finding.message

    def test_one_that_cannot_be_asked_is_told_with_what_it_failed_by(self) -> None:
        case = Tier().case()
        failed = ServerCredentials("two", "NoPermission", "ACL SETUSER data at two:6379: the user may not")
        finding = password_finding(replace(case, looks={**case.looks, "two": failed}), None)
        assert (finding.status, finding.reason) == ("Unknown", "NoPermission")
        assert finding.message == "two: ACL SETUSER data at two:6379: the user may not"
        unasked = password_finding(replace(case, looks={}), None)
        assert (unasked.status, unasked.reason) == ("Unknown", "Progressing")

    def test_passwords_in_force_stay_while_a_server_does_not_answer(self) -> None:
        tier = Tier()
        for at in rotate(tier):
            if at.facts.stage is Stage.STAGED:
                break
        tier.servers["three"].up = False
        tier.pass_s(10 * OVERLAP_S)
        tier.run()
        assert tier.facts.stage is Stage.STAGED

    def test_the_overlap_counts_as_current(self) -> None:
        tier = Tier()
        for at in rotate(tier):
            if at.facts.stage is Stage.OVERLAP and next_step(at.case()) is not None:
                break
        tier.run()
        finding = password_finding(tier.case(), next_step(tier.case()))
        assert (finding.status, finding.reason) == ("True", "PasswordsOverlap")


class TestLostPasswords:
    def test_are_told_as_such(self) -> None:
        tier = Tier()
        tier.secret = passwords.made(DOMAIN, {}, tier.draw)
        finding = password_finding(tier.case(), next_step(tier.case()))
        assert (finding.status, finding.reason) == ("False", "PasswordsLost")


class TestTheSecret:
    def test_holds_every_password_that_its_file_admits_and_no_others(self) -> None:
        tier = Tier()
        assert all(at.facts.whole for at in rotate(tier))
        assert not password_facts(
            {**tier.secret, names.PASSWORD_KEY: b"another"},
            lineage="", changed_at=START, rotated_at=START, honoured="",
        ).whole  # fmt: skip

    def test_keeps_its_rights_and_their_marker_through_all_stages(self) -> None:
        markers = {at.facts.marker for at in rotate(Tier())}
        assert len(markers) == 1
        assert markers.pop().startswith(MARKER_PREFIX)

    def test_that_lost_one_password_gets_that_one_anew(self) -> None:
        tier = Tier()
        there = {key: value for key, value in tier.secret.items() if key != names.PASSWORD_KEY}
        mended = passwords.made(DOMAIN, there, tier.draw)
        assert mended[names.PASSWORD_KEY] not in (b"", tier.secret[names.PASSWORD_KEY])
        assert mended[names.ADMIN_PASSWORD_KEY] == tier.secret[names.ADMIN_PASSWORD_KEY]

    def test_tells_facts_in_which_no_password_is(self) -> None:
        for at in rotate(Tier()):
            told = repr(at.facts)
            held = [value for key, value in at.secret.items() if key.endswith("password")]
            assert not any(value.decode() in told for value in held)
