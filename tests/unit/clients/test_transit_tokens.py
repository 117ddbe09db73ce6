"""Tokens for a key management service: used to their end while they cannot be renewed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstrata.clients.transit import KmsError, KmsFailure
from kvstrata.clients.transit_tokens import RETRY_S, KubernetesLogin

LEASE_S = 1000


class Service:
    """It gives out numbered tokens, unless it is away."""

    def __init__(self) -> None:
        self.logins, self.away = 0, False

    async def call(self, *_: Any) -> Any:
        self.logins += 1
        if self.away:
            raise KmsError(KmsFailure.UNREACHABLE, "no route to the service")
        return {"auth": {"client_token": f"token-{self.logins}", "lease_duration": LEASE_S}}


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def login(tmp_path: Path, clock: list[float]) -> KubernetesLogin:
    (tmp_path / "account").write_text("jwt")
    return KubernetesLogin("kvstrata", tmp_path / "account", monotonic=lambda: clock[0])


async def test_a_token_that_cannot_be_renewed_is_used_to_its_end_and_its_failure_has_a_name(
    login: KubernetesLogin, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    service: Any = Service()
    assert await login.token(service) == "token-1"
    service.away, clock[0] = True, 0.6 * LEASE_S
    assert await login.token(service) == "token-1"
    assert "was not renewed" in caplog.text
    assert await login.token(service) == "token-1"
    assert service.logins == 2, "it waits before the next try"
    clock[0] += RETRY_S
    assert await login.token(service) == "token-1"
    assert service.logins == 3
    clock[0] = LEASE_S
    for _ in range(2):
        with pytest.raises(KmsError, match=r"has ended, .* \(Unreachable\): no route to the service") as raised:
            await login.token(service)
        assert raised.value.reason is KmsFailure.TOKEN_NOT_RENEWED
    service.away = False
    assert await login.token(service) == "token-6"


async def test_a_token_that_was_refused_is_not_used_again(login: KubernetesLogin) -> None:
    service: Any = Service()
    token = await login.token(service)
    service.away = True
    assert login.refused(token)
    with pytest.raises(KmsError) as raised:
        await login.token(service)
    assert raised.value.reason is KmsFailure.UNREACHABLE


async def test_an_account_file_that_is_gone_is_a_renewal_that_fails(
    login: KubernetesLogin, clock: list[float], tmp_path: Path
) -> None:
    service: Any = Service()
    token = await login.token(service)
    (tmp_path / "account").unlink()
    clock[0] = 0.9 * LEASE_S
    assert await login.token(service) == token
