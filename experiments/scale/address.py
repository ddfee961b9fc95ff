"""The address at which the processes of a run meet, as ``--distributed=HOST:PORT,N,I`` gives it."""

import re
import socket
from typing import NamedTuple

from experiments.errors import Mistake


class Address(NamedTuple):
    """The address of process 0, the number of processes, and the number of this one."""

    coordinator: str
    count: int
    index: int

    @classmethod
    def read(cls, option: str) -> "Address":
        """Return the address in a value of --distributed.

        Raises:
          Mistake: The value has another form, or there is no process of this number.
        """
        match = re.fullmatch(r"(.+:\d+),(\d+),(\d+)", option)
        if match is None:
            raise Mistake(
                f"--distributed={option}: write auto, off, or HOST:PORT,N,I: the address of process 0, the number of "
                "processes, and the number of this one."
            )
        address = cls(match[1], int(match[2]), int(match[3]))
        if address.index >= address.count:
            raise Mistake(
                f"--distributed={option}: the number of this process is {address.index}, and must be less than the "
                f"number of processes, {address.count}. The first process is 0."
            )
        return address

    def place(self) -> str:
        """Return the address at which process 0 listens, or "" for all addresses of its machine.

        It listens at the address of HOST. The name of a machine may stand for its loopback address, as in /etc/hosts of
        Debian. Other machines cannot reach that address, so process 0 then listens at all addresses.
        """
        host = self.coordinator.rpartition(":")[0]
        try:
            place = socket.gethostbyname(host)
            socket.create_server((place, 0)).close()  # fails for the address of another machine, such as a gateway
        except (OSError, UnicodeError):
            return ""
        return place if host in ("localhost", place) or not place.startswith("127.") else ""

    def refuse_taken_port(self) -> None:
        """Raise if this is process 0 and another program listens at its port. JAX would abort."""
        port = int(self.coordinator.rpartition(":")[2])
        if self.index == 0:
            try:
                socket.create_server((self.place(), port)).close()
            except (OSError, OverflowError) as error:
                raise Mistake(
                    f"--distributed: process 0 cannot listen at {self.coordinator}, where another process may listen "
                    f"already: {str(error)[:60]}. End that process, or write another port."
                ) from error

    def refuse_other_counts(self, seconds: int) -> None:
        """Raise if process 0 has another number of processes. Process 0 compares its number with all others.

        Processes that disagree would wait for each other's devices.

        Args:
          seconds: How long to wait for an answer.
        """
        from jax._src import distributed  # the client that exchanges values is not public

        client = distributed.global_state.client
        client.key_value_set(f"nmjax/count/{self.index}", str(self.count))
        for other in range(1, self.count) if self.index == 0 else [0]:
            told = int(client.blocking_key_value_get(f"nmjax/count/{other}", seconds * 1000))
            if told != self.count:
                raise Mistake(
                    f"--distributed: process {self.index} has N={self.count}, and process {other} has N={told}. "
                    "Give all processes the same N in HOST:PORT,N,I."
                )
