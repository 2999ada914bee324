"""The Py4J client of one simulator process; the only module that imports Py4J, and itself imported at first use."""

from typing import Any

from py4j.java_gateway import GatewayClient, GatewayParameters, JavaGateway
from py4j.protocol import Py4JNetworkError


class _OneTryClient(GatewayClient):
    """Raises when the connection breaks.

    The stock client writes a traceback to the root logger and sends some commands again: a step must run once, and a
    process that ended is reported by one exception, not by a page of log.
    """

    def send_command(self, command: str, retry: bool = True, binary: bool = False) -> Any:
        connection = self._get_connection()
        try:
            response = connection.send_command(command)
        except Py4JNetworkError:
            connection.close(False)
            raise
        self._give_back_connection(connection)
        return response


class _Gateway(JavaGateway):
    def _create_gateway_client(self) -> GatewayClient:
        return _OneTryClient(gateway_parameters=self.gateway_parameters)


def open_gateway(port: int, token: str) -> JavaGateway:
    """Connect to a gateway process on this machine.

    Memory management is off: with it, every Java object that Python drops costs a call, and calls made by the garbage
    collector fail loudly once the process has ended. The few objects that are neither text nor numbers are detached by
    hand.
    """
    return _Gateway(
        gateway_parameters=GatewayParameters(port=port, auth_token=token, enable_memory_management=False),
    )
