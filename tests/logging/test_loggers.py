"""Each logger's files are read by the package they are for."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
import warnings

import numpy as np
import pytest
import torch

from reap.errors import WrongArgument, WrongState
from reap.loggers import CSVLogger, JSONLLogger, SeveralLoggers, TensorBoardLogger

VIDEO = np.arange(5 * 16 * 24 * 3, dtype=np.uint8).reshape(5, 16, 24, 3)


def log_three(logger):
    logger.log(0, {"return": 1.5, "late": None})
    logger.log(10, {"return": torch.tensor([2.5])}, histograms={"action": torch.arange(100.0)})
    logger.log(20, {"return": np.float32(3.5), "late": math.nan}, videos={"eval/video": VIDEO})


def test_json_lines(tmp_path):
    with JSONLLogger(tmp_path / "run") as logger:
        log_three(logger)
    with JSONLLogger(tmp_path / "run") as logger:  # it goes on
        logger.log(30, {"return": 4.5})
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 10, 20, 30]
    assert [row["return"] for row in rows] == [1.5, 2.5, 3.5, 4.5]
    assert sum(rows[1]["action"]["counts"]) == 100
    assert rows[2]["late"] == "nan"
    assert (tmp_path / "run" / rows[2]["eval/video"]).stat().st_size > 100


def test_csv_and_pandas(tmp_path):
    pandas = pytest.importorskip("pandas")
    with CSVLogger(tmp_path) as logger:
        log_three(logger)
    with CSVLogger(tmp_path) as logger:
        logger.log(30, {"return": 4.5, "newer": 1})
    table = pandas.read_csv(tmp_path / "log.csv")
    assert table["step"].tolist() == [0, 10, 20, 30]
    assert table["return"].tolist() == [1.5, 2.5, 3.5, 4.5]
    assert table["action/p50"].tolist()[1] == 49.5
    assert table["newer"].tolist()[-1] == 1
    assert table["eval/video"][2] == "videos/eval_video_20.mp4"
    with (tmp_path / "log.csv").open(newline="") as file:
        assert len({len(row) for row in csv.reader(file)}) == 1


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoardLogger(tmp_path) as logger:
        log_three(logger)
    logger.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(one.step, one.value) for one in events.Scalars("return")] == [(0, 1.5), (10, 2.5), (20, 3.5)]
    (histogram,) = events.Histograms("action")
    assert histogram.step == 10
    assert histogram.histogram_value.num == 100
    assert sum(histogram.histogram_value.bucket) == 100
    (image,) = events.Images("eval/video")
    gif = Image.open(io.BytesIO(image.encoded_image_string))
    assert (gif.n_frames, gif.size) == (5, (24, 16))


WANDB = """
import json, struct, sys, time
import numpy as np
from pathlib import Path
from reap.loggers import WandbLogger

where = Path(sys.argv[1])
with WandbLogger("reap-test", "first", config={"lr": 0.1}, mode="offline", directory=where) as logger:
    logger.log(0, {"return": 1.5})
    logger.log(10, {"return": 2.5}, histograms={"action": np.arange(100.0)})
    logger.log(20, {"return": 3.5}, videos={"eval/video": np.zeros((5, 16, 24, 3), np.uint8)})
logger.close()

from wandb.proto import wandb_internal_pb2

(file,) = where.glob("wandb/offline-run-*/*.wandb")


def records(data, block=32768):
    # W&B's transaction log: a file header of 7 bytes, then pieces with a head of checksum, length and kind.
    at, piece = 7, b""
    while at < len(data):
        left = block - at % block
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        piece += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield piece
            piece = b""


def read():
    returns, videos = {}, []
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {(item.key or "/".join(item.nested_key)): item.value_json for item in record.history.item}
        if "return" in items:
            step = json.loads(items["_step"]) if "_step" in items else record.history.step.num
            returns[int(step)] = float(items["return"])
        videos += [key for key in items if "video" in key]
    return returns, videos


deadline = time.monotonic() + 60
returns, videos = {}, []
while len(returns) < 3 and time.monotonic() < deadline:  # a process of W&B's writes it, when it gets its turn
    try:
        returns, videos = read()
    except Exception:  # half a record
        time.sleep(0.1)
assert returns == {0: 1.5, 10: 2.5, 20: 3.5}, returns
assert videos
assert list(where.glob("wandb/offline-run-*/files/media/videos/eval/*.mp4"))
print("fine")
"""


@pytest.mark.timeout(120)
def test_weights_and_biases_offline(tmp_path, programs):
    if importlib.util.find_spec("wandb") is None:  # imported, it would leave threads behind
        pytest.skip("no wandb here")
    done = programs.run(WANDB, str(tmp_path), timeout=100)
    assert done.stdout.splitlines()[-1:] == ["fine"], done.stderr


MLFLOW = """
import sys
import numpy as np
from pathlib import Path
from mlflow import MlflowClient
from reap.loggers import MLflowLogger

where = Path(sys.argv[1]).as_uri()
with MLflowLogger("reap-test", "first", config={"lr": 0.1}, tracking_uri=where) as logger:
    logger.log(0, {"return": 1.5})
    logger.log(10, {"return": 2.5}, histograms={"action": np.arange(100.0)})
    logger.log(20, {"return": 3.5}, videos={"eval/video": np.zeros((5, 16, 24, 3), np.uint8)})
logger.close()

client = MlflowClient(where)
run = client.get_run(logger.run_id)
assert run.info.status == "FINISHED"
assert run.data.params == {"lr": "0.1"}
history = client.get_metric_history(logger.run_id, "return")
assert [(one.step, one.value) for one in history] == [(0, 1.5), (10, 2.5), (20, 3.5)]
assert run.data.metrics["action/p50"] == 49.5
(video,) = client.list_artifacts(logger.run_id, "videos")
assert video.path == "videos/eval_video_20.mp4"
print("fine")
"""


@pytest.mark.timeout(120)
def test_mlflow_file_store(tmp_path, programs, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    done = programs.run(MLFLOW, str(tmp_path / "store"), timeout=100)
    assert done.stdout.splitlines()[-1:] == ["fine"], done.stderr


def test_several_at_once(tmp_path):
    with SeveralLoggers(CSVLogger(tmp_path), JSONLLogger(tmp_path)) as logger:
        log_three(logger)
    assert (tmp_path / "log.csv").stat().st_size
    assert (tmp_path / "log.jsonl").stat().st_size


def test_what_is_no_number_is_told(tmp_path):
    with (
        JSONLLogger(tmp_path) as logger,
        pytest.raises(WrongArgument, match="scalars holds 'loss', which is not a number"),
    ):
        logger.log(0, {"loss": torch.zeros(3)})


def test_a_loss_with_its_graph_is_a_number(tmp_path):
    loss = torch.ones(3, requires_grad=True).sum()
    with CSVLogger(tmp_path) as logger, warnings.catch_warnings():
        warnings.simplefilter("error")
        logger.log(1, {"loss": loss})
    assert (tmp_path / "log.csv").read_text().splitlines()[1].endswith(",3.0")


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger])
def test_a_closed_logger_writes_nothing(tmp_path, kind):
    logger = kind(tmp_path)
    logger.log(0, {"a": 1})
    logger.close()
    logger.close()
    (file,) = tmp_path.iterdir()
    before = file.read_text()
    with pytest.raises(WrongState, match=f"this {kind.__name__} is closed"):
        logger.log(1, {"new": 1})
    assert file.read_text() == before


def test_arguments_in_another_order_are_named(tmp_path):
    with CSVLogger(tmp_path) as logger:
        with pytest.raises(WrongArgument, match="scalars must be a mapping from names.*got 0"):
            logger.log({"a": 1.0}, 0)
        with pytest.raises(WrongArgument, match="step must be a whole number.*got {'a': 1.0}"):
            logger.log({"a": 1.0})
