"""`asyncrl.train`: starts a run from Python, in a script or in Jupyter."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from asyncrl.config import Config, ConfigError, OfflineConfig, explain, load_any
from asyncrl.rundir.reader import Run, open_run

INTERRUPTED = 130
"""Exit code of an interrupted run."""


class RunFailedError(RuntimeError):
    """The run ended before its last step. The cause was printed, and is in the run's driver.log."""


def train(
    config: Config | OfflineConfig | Mapping[str, object] | str | Path,
    overrides: Sequence[str] = (),
) -> Run | Awaitable[Run]:
    """Train according to the config, and return the finished run as `asyncrl.open_run` does.

    A plain call blocks. If an event loop is running, as in Jupyter, the call returns an awaitable:
    `run = await asyncrl.train(config)`. The run is then in its own thread, and canceling the call
    (the interrupt button) stops it as Ctrl-C does: after its step, with a checkpoint. A second
    interrupt does not wait for that. A finished run that is resumed is returned as it is.

    Args:
        config: a `Config` or `OfflineConfig`, the same settings as nested mappings, or the path of
            a YAML file. The setting `objective` makes it a run on a dataset.
        overrides: overrides for a YAML file, as on the command line:
            `["--rollout.temperature", "0.8"]`.

    Raises:
        ConfigError: a setting cannot be used. Nothing was started, and nothing is left behind.
        RunFailedError: the run ended before its last step.
        KeyboardInterrupt: a plain call was interrupted.
    """
    settings = _settings(config, overrides)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _finished(settings, None)
    return _in_thread(settings)


def _settings(
    config: Config | OfflineConfig | Mapping[str, object] | str | Path, overrides: Sequence[str]
) -> Config | OfflineConfig:
    if isinstance(overrides, str):
        raise ConfigError(
            f"overrides = {overrides!r} is a string; give a list of words, such as"
            ' ["--rollout.temperature", "0.8"]'
        )
    if isinstance(config, (str, Path)):
        return load_any(config, list(map(str, overrides)))
    if not isinstance(config, (Config, OfflineConfig, Mapping)):
        raise ConfigError(
            f"config is of type {type(config).__name__}; give a Config, nested mappings, or the"
            " path of a YAML file"
        )
    if overrides:
        raise ConfigError(
            f"overrides = {list(overrides)} work only with the path of a YAML file; change the"
            " settings of the config itself"
        )
    if not isinstance(config, Mapping):
        return config
    kind = OfflineConfig if "objective" in config else Config
    try:
        return kind.model_validate(dict(config))
    except ValidationError as error:
        raise ConfigError(explain(error, kind)) from None


def _finished(
    config: Config | OfflineConfig, on_start: Callable[[Callable[[], None]], None] | None
) -> Run:
    from asyncrl.run import supervise, train as run
    from asyncrl.run.before_start import check_before_start
    from asyncrl.run.offline import run as offline

    config, finished = check_before_start(config)
    directory = config.run_directory
    if finished is not None:
        return open_run(directory)
    resume = [supervise.command_name(), "train", str(directory / "config.yaml")]
    code = (
        offline.run_offline(config, resume, on_start=on_start)
        if isinstance(config, OfflineConfig)
        else run.run_training(config, resume, on_start=on_start)
    )
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise RunFailedError(
            f"run {config.name!r} failed; the cause is above and in {directory}/logs"
        )
    return open_run(directory)


async def _in_thread(config: Config | OfflineConfig) -> Run:
    """Run in a thread. Canceling this coroutine stops the run and waits for its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Run] = loop.create_future()
    stops: list[Callable[[], None]] = []
    cancelled = threading.Event()

    def register_stop(stop: Callable[[], None]) -> None:
        stops.append(stop)
        if cancelled.is_set():
            stop()

    def settle(result: Run | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(
                error
                if not isinstance(error, KeyboardInterrupt)
                else RunFailedError(f"run {config.name!r} was interrupted")
            )
        else:
            assert result is not None
            done.set_result(result)

    def work() -> None:
        try:
            result, error = _finished(config, register_stop), None
        except BaseException as raised:
            result, error = None, raised
        loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="asyncrl-train", daemon=True).start()
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        cancelled.set()
        while not done.done():
            if stops:
                stops[-1]()
            try:
                await asyncio.wait({done})
            except asyncio.CancelledError:
                continue  # a second interrupt, which does not wait for the checkpoint
        raise
