"""TensorBoardLogger: writes event files with TensorBoard's own writer."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import numpy as np

from reap.errors import missing
from reap.loggers.base import Logger
from reap.video import as_frames


class TensorBoardLogger(Logger):
    """Writes event files to a directory, for `tensorboard --logdir`. Videos are animated images.

    >>> logger = TensorBoardLogger("runs/first")
    """

    def __init__(self, directory: Any) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise missing("tensorboard", "tensorboard") from None
        self.directory = Path(directory)
        self._events, self._summaries = event_pb2, summary_pb2
        self._writer: Any = EventFileWriter(str(self.directory))

    def _log(
        self, step: int, scalars: dict[str, float], videos: dict[str, Any], histograms: dict[str, np.ndarray[Any, Any]]
    ) -> None:
        kinds = self._summaries.Summary
        values = [kinds.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        values += [kinds.Value(tag=name, image=self._image(video)) for name, video in videos.items()]
        values += [kinds.Value(tag=name, histo=self._histogram(one)) for name, one in histograms.items()]
        if values:
            summary = kinds(value=values)
            self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))

    def _image(self, video: Any) -> Any:
        from PIL import Image  # a dependency of TensorBoard

        frames = as_frames(video)
        images = [Image.fromarray(frame) for frame in frames]
        file = io.BytesIO()
        delay = 1000 / self.fps
        images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=delay, loop=0)
        height, width = frames.shape[1:3]
        return self._summaries.Summary.Image(
            height=height, width=width, colorspace=3, encoded_image_string=file.getvalue()
        )

    def _histogram(self, values: np.ndarray[Any, Any]) -> Any:
        counts, edges = np.histogram(values, bins=30)
        return self._summaries.HistogramProto(
            min=values.min(),
            max=values.max(),
            num=len(values),
            sum=values.sum(),
            sum_squares=float(values @ values),
            bucket_limit=edges[1:].tolist(),
            bucket=counts.tolist(),
        )

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
