"""Loggers: send the numbers, videos and histograms of a run to files, TensorBoard, W&B or MLflow.

>>> from reap.loggers import TensorBoardLogger
>>> logger = TensorBoardLogger("runs/first")
>>> for batch in collector.progress(100_000, logger=logger):
...     logger.log(collector.stats()["frames"], {"loss": loss})
"""

from reap.loggers.base import Logger
from reap.loggers.files import CSVLogger, JSONLLogger, SeveralLoggers
from reap.loggers.mlflow import MLflowLogger
from reap.loggers.tensorboard import TensorBoardLogger
from reap.loggers.wandb import WandbLogger

__all__ = [
    "CSVLogger",
    "JSONLLogger",
    "Logger",
    "MLflowLogger",
    "SeveralLoggers",
    "TensorBoardLogger",
    "WandbLogger",
]
