"""TensorBoard's events, read back with TensorBoard's own messages: settings, scores, images and texts."""

import io
import struct

import numpy as np
import pytest
from PIL import Image
from tensorboardX.proto import event_pb2, plugin_hparams_pb2

from experiments.training import board, record
from experiments.training.events import Events
from tests.experiments.training.record_test import PLAN, begun, identity


def events(folder):
    """The events of all files in a folder, as TensorBoard reads them: a length, its sum, the bytes, their sum."""
    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            found.append(event_pb2.Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return found


def values(folder):
    """The values of the summaries, by their tags."""
    return {value.tag: value for event in events(folder) for value in event.summary.value}


def hparams(value):
    assert value.metadata.plugin_data.plugin_name == "hparams"
    return plugin_hparams_pb2.HParamsPluginData.FromString(value.metadata.plugin_data.content)


PICTURES = {
    "mask": np.array([[True, False], [False, True]]),
    "hardest_images": np.arange(3 * 8 * 8, dtype=np.uint8).reshape(3, 8, 8, 1),
    "hardest_labels": np.array([0, 1, 1]),
    "hardest_predictions": np.array([1, 0, 1]),
    "hardest_confidence": np.array([0.75, 0.5, 0.5]),
    "hardest_loss": np.array([4.0, 3.0, 2.0]),
    "classes": np.array(["cat", "do*g"]),
}


def test_a_run_has_its_settings_scores_pictures_and_texts(tmp_path):
    run = record.Record(
        tmp_path, identity(model={"depth": 2}, dtype="bf16", ema=0.5, flag=True, none=None, many=[1]),
        {"name": "x", "command": "python launch.py\n# *not a list*", "steps": 4}, PLAN,
    )  # fmt: skip
    run.begin(0)
    run.write("test", 4, accuracy=0.75)
    run.keep(summary=[], about={"figures": {"accuracy": 0.75}}, pictures=PICTURES)
    run.close("finished")
    found = values(tmp_path / "tensorboard")
    start = hparams(found["_hparams_/session_start_info"]).session_start_info
    fields = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
    assert fields == {
        "seed": 0, "model.depth": 2, "dtype": "bf16", "ema": 0.5, "flag": True, "none": "None", "many": "[1]",
    }  # fmt: skip
    metrics = hparams(found["_hparams_/experiment"]).experiment.metric_infos
    assert [metric.name.tag for metric in metrics] == ["test/accuracy"]
    assert found["test/accuracy"].simple_value == 0.75  # the tag of the metric is a curve
    assert hparams(found["_hparams_/session_end_info"]).session_end_info.status == 1  # success
    command = found["command/text_summary"].tensor.string_val[0].decode()
    assert command == "    python launch.py\n    # *not a list*"
    assert '"depth": 2' in found["config/text_summary"].tensor.string_val[0].decode()
    assert "    cat taken for do*g (75.0%), loss 4.000" in found["hardest/text_summary"].tensor.string_val[0].decode()
    with Image.open(io.BytesIO(found["mask"].image.encoded_image_string)) as mask:
        cells = np.asarray(mask.convert("L"))[board.CELL // 2 :: board.CELL, board.CELL // 2 :: board.CELL]
    np.testing.assert_array_equal(cells > 128, PICTURES["mask"])
    size = found["hardest"].image
    assert (size.height, size.width) == (68, 8 * 68)


def test_a_sheet_shows_every_image_in_its_place():
    pictures = np.arange(1, 11, dtype=np.uint8)[:, None, None, None] * np.ones((1, 8, 8, 3), np.uint8)
    sheet = board.sheet(pictures)
    assert sheet.shape == (2 * 68, 8 * 68, 3)
    centres = sheet[34::68, 34::68, 0]
    np.testing.assert_array_equal(centres.ravel(), [*range(1, 11), *[255] * 6])


def test_a_language_model_has_samples_and_hardest_windows(tmp_path):
    events_of_run = Events(tmp_path, 0)
    hardest = [{"loss": 2.5, "pieces": [("a", None), ("b c", 2.5)]}]
    board.write(events_of_run, 3, {"prompt": "It ", "samples": ["was\n# no", "is"], "hardest": hardest})
    events_of_run.close()
    found = values(tmp_path)
    samples = found["samples/text_summary"].tensor.string_val[0].decode()
    assert samples == "    It was\n    # no\n\n---\n\n    It is"
    assert found["hardest/text_summary"].tensor.string_val[0].decode() == "2.500 nats per token\n\n    ab c"
    assert [event.step for event in events(tmp_path) if event.summary.value] == [3, 3]


def test_pictures_of_another_form_do_not_end_a_run(tmp_path, capsys):
    run = begun(tmp_path)
    run.write("test", 1, loss=1.0)
    odd = {"mask": np.zeros(3), "hardest_images": np.zeros((2, 5))}
    run.keep(summary=[], about={"figures": {"loss": 1.0}}, pictures=odd)
    run.close("finished")
    assert "The pictures are not in TensorBoard" in capsys.readouterr().out
    assert "_hparams_/experiment" in values(tmp_path / "tensorboard")


# ---- the report while a run goes on ----


def test_a_report_is_there_from_the_beginning_and_says_that_the_run_goes_on(tmp_path):
    run = record.Record(tmp_path, identity(), {"name": "x", "steps": 10}, PLAN)
    run.begin(0)
    page = (tmp_path / "report.html").read_text()
    assert "running" in page
    assert 'http-equiv="refresh"' in page
    run.write("train", 4, loss=1.0)
    run.show()
    assert "step 4 of 10" in (tmp_path / "report.html").read_text()
    run.close("interrupted")
    page = (tmp_path / "report.html").read_text()
    assert "interrupted" in page
    assert 'http-equiv="refresh"' not in page


def test_an_error_of_the_report_does_not_end_a_run_and_is_told_once(tmp_path, monkeypatch, capsys):
    run = begun(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record.report, "write", full)
    for _ in range(3):
        run.show()
    assert capsys.readouterr().out.count("report.html cannot be written now: No space left on device") == 1
    run.close("failed: x")
    with pytest.raises(OSError, match="No space"):
        run.close("finished")  # finished means that the report is there
    assert record.read(tmp_path)["outcome"] == "failed: x"


@pytest.mark.parametrize("beside", [0, 4])
def test_reports_take_a_small_share_of_the_time_of_a_run(tmp_path, monkeypatch, beside):
    now, written = [1000.0], []
    monkeypatch.setattr(record.time, "monotonic", lambda: now[0])

    def slow(*_):
        written.append(now[0])
        now[0] += 2.0

    monkeypatch.setattr(record.report, "write", slow)
    run = begun(tmp_path)
    run.about["trained_with"] = ["x"] * beside
    for _ in range(1000):
        now[0] += 1.0
        run.show()
    share = record.SHOWING * run.elapsed() / (1 + beside)
    assert share / 2 <= len(written) * 2.0 <= share + 4.0  # the page of the beginning, and the last one
    run.close("interrupted")


@pytest.mark.parametrize("step", [0, 5])
def test_a_run_that_begins_again_tells_tensorboard_to_drop_later_steps(step, tmp_path):
    Events(tmp_path, step).close()
    marks = [event for event in events(tmp_path) if event.HasField("session_log")]
    assert [(mark.step, mark.session_log.status) for mark in marks] == [
        (step + 1 if step else 0, event_pb2.SessionLog.START)
    ]
