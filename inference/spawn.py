"""One life of a runner process: its pipes, its end, and ways to bring that about.

Nothing here waits for anything but the process: commands go to a bounded queue, reports to a callback that does not wait.
"""

import signal
from collections.abc import Callable

import trio
from msgspec import Struct

from inference.requests import Request
from inference.runner_protocol import COMMANDS, REPORTS, Cancel, LoadModel, Report, Shutdown, Submit
from inference.runner_state import RunnerProcess
from p2p.wire import ProtocolViolation

READ_BYTES = 1 << 16
STDERR_BYTES_MAX = 4096  # of its last lines
OUTGOING_FRAMES_MAX = 4096  # commands that it has not read; with more it is taken for stalled
OUTGOING_BYTES_MAX = 256 << 20
WRITE_SECONDS_MAX = 60.0  # for what is queued to be read; its reader does nothing but read
DRAIN_SECONDS_MAX = 2.0  # after its end, for what it left in the pipes: a child of its own may hold them open
LINGER_SECONDS_MAX = 5.0  # from the end of its reports to its exit
TERMINATE_SECONDS = 2.0  # from SIGTERM to SIGKILL
REAP_SECONDS_MAX = 10.0  # from SIGKILL to its end: freeing much memory takes a while


class Ending(Struct, frozen=True):
    """How a spawn ended."""

    reason: str  # one sentence
    stderr: str = ""  # its last lines
    hopeless: bool = False  # the next one would end alike: the model itself can't be loaded


class Spawn:
    """See the module. `serve` is its life; everything else may be called during it."""

    def __init__(self, process: RunnerProcess) -> None:
        self._process = process
        self._outgoing: list[bytes] = []
        self._outgoing_bytes = 0  # those being written counted too
        self._outgoing_lot = trio.lowlevel.ParkingLot()
        self._stderr = bytearray()
        self._cause: str | None = None
        self._hopeless = False
        self._exited = trio.Event()
        self._reports_ended = trio.Event()
        self._stderr_ended = trio.Event()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def ending(self) -> bool:
        """Whether it is at its end, or being brought there: no use in sending anything."""
        return self._exited.is_set() or self._cause is not None

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises: ValueError where no runner would take it for one, by one sentence.
        """
        self._queue(COMMANDS.encode_checked(Submit(request)))

    def send(self, command: LoadModel | Cancel | Shutdown) -> None:
        """Queue a command of our own."""
        self._queue(COMMANDS.encode(command))

    def _queue(self, frame: bytes) -> None:
        self._outgoing.append(frame)
        self._outgoing_bytes += len(frame)
        if len(self._outgoing) > OUTGOING_FRAMES_MAX or self._outgoing_bytes > OUTGOING_BYTES_MAX:
            self.put_down("The runner stopped reading its commands.")
        self._outgoing_lot.unpark()

    def put_down(self, cause: str) -> None:
        """Kill it; the first cause is the one that is told."""
        self._cause = self._cause or cause
        self._process.kill()

    def expect_end(self, cause: str) -> None:
        """It said that it can't go on, and why; it exits by itself."""
        self._cause = self._cause or cause
        self._hopeless = True

    async def serve(self, on_report: Callable[[Report], None]) -> Ending:
        """Carry commands and reports until it has ended and been reaped, and all it said has been read.

        A report that raises ProtocolViolation in `on_report` is its end, as is anything on the pipe that is no report.
        Cancelling kills it.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                nursery.start_soon(self._read_reports, on_report)
                nursery.start_soon(self._read_stderr)
                status = await self._process.wait()
                self._exited.set()
                with trio.move_on_after(DRAIN_SECONDS_MAX):
                    await self._reports_ended.wait()
                    await self._stderr_ended.wait()
                nursery.cancel_scope.cancel()
        finally:
            await self._bury()
        return Ending(self._cause or exit_sentence(status), last_lines(self._stderr), self._hopeless)

    async def _bury(self) -> None:
        with trio.move_on_after(REAP_SECONDS_MAX, shield=True):
            self._process.kill()
            await self._process.wait()
        self._exited.set()
        self._outgoing.clear()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            await trio.aclose_forcefully(pipe)

    async def wind_up(self, grace: float) -> None:
        """Ask it to end, after `grace` seconds terminate it, then kill it; returns when it is gone or past all bounds."""
        self.send(Shutdown())
        with trio.move_on_after(grace):
            await self._exited.wait()
            return
        self._process.terminate()
        with trio.move_on_after(TERMINATE_SECONDS):
            await self._exited.wait()
            return
        self._process.kill()
        with trio.move_on_after(REAP_SECONDS_MAX):
            await self._exited.wait()

    async def _write(self) -> None:
        try:
            while True:
                while not self._outgoing:
                    await self._outgoing_lot.park()
                data = b"".join(self._outgoing)
                self._outgoing.clear()
                with trio.fail_after(WRITE_SECONDS_MAX):
                    await self._process.stdin.send_all(data)
                self._outgoing_bytes -= len(data)
        except trio.TooSlowError:
            self.put_down("The runner stopped reading its commands.")
        except trio.BrokenResourceError:
            pass  # it is at its end, which is seen elsewhere

    async def _read_reports(self, on_report: Callable[[Report], None]) -> None:
        reader = REPORTS.reader()
        try:
            while data := await self._process.stdout.receive_some(READ_BYTES):
                for report in reader.feed(data):
                    on_report(report)
        except ProtocolViolation as violation:
            self.put_down(f"The runner broke the protocol: {violation}.")
        except trio.BrokenResourceError:
            pass
        finally:
            self._reports_ended.set()
        with trio.move_on_after(LINGER_SECONDS_MAX):
            await self._exited.wait()
            return
        self.put_down("The runner closed its reports and went on.")

    async def _read_stderr(self) -> None:
        try:
            while data := await self._process.stderr.receive_some(READ_BYTES):
                self._stderr += data
                del self._stderr[:-STDERR_BYTES_MAX]
        except trio.BrokenResourceError:
            pass
        finally:
            self._stderr_ended.set()


def exit_sentence(status: int) -> str:
    """How a process ended, for people, from its exit status or minus its signal's number."""
    if status >= 0:
        return f"The runner exited with status {status}."
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"The runner was killed by {name}."


def last_lines(data: bytes | bytearray) -> str:
    """What a process said last, without the beginning of a line that was cut off."""
    text = data.decode("utf-8", "replace")
    if len(data) >= STDERR_BYTES_MAX and "\n" in text:
        text = text.partition("\n")[2]
    return text.strip()
