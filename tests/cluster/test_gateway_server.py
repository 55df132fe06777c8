"""GatewayServer, as far as it needs no Ray: how it listens. The rest of it is tested with a cluster."""

import socket

import pytest

from espalier.cluster.call import STALLED_S
from espalier.cluster.gateway_server import _listen


def test_connections_of_clients_that_take_nothing_are_reset() -> None:
    with _listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == STALLED_S * 1000


def test_a_port_in_use_is_refused() -> None:
    with _listen("127.0.0.1", 0) as listener, pytest.raises(OSError, match="in use"):
        _listen("127.0.0.1", listener.getsockname()[1])
