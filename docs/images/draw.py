"""Draw the diagrams of the documentation: `python docs/images/draw.py` writes an SVG file for each, beside this one."""

from __future__ import annotations

import html
from pathlib import Path

HERE = Path(__file__).parent
FILLS = {"teal": "#d5efeb", "grey": "#eceff1", "sand": "#fdf0d5", "white": "#ffffff", "red": "#f8dcd4"}
INK, LINE = "#263238", "#546e7a"


class Drawing:
    """A diagram of boxes, arrows and words on a white page."""

    def __init__(self, name: str, width: int, height: int) -> None:
        self.name, self.width, self.height, self.parts = name, width, height, []

    def box(self, x, y, w, h, words="", fill="grey", bold=False, dash=False, size=13, top=False):
        style = ' stroke-dasharray="5 4"' if dash else ""
        shape = f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{FILLS[fill]}" stroke="{LINE}"{style}/>'
        self.parts.append(shape)
        lines = words.split("\n") if words else []
        first = y + 17 if top else y + h / 2 - (len(lines) - 1) * 8.5 + 4.5
        for i, line in enumerate(lines):
            self.text(x + w / 2, first + 17 * i, line, "middle", bold and i == 0, size)
        return self

    def text(self, x, y, words, anchor="start", bold=False, size=13, color=INK):
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{color}"{weight}>'
            f"{html.escape(words)}</text>"
        )
        return self

    def arrow(self, *points, words="", at=None, anchor="middle", dash=False, both=False):
        path = "M" + " L".join(f"{x} {y}" for x, y in points)
        style = ' stroke-dasharray="5 4"' if dash else ""
        start = ' marker-start="url(#back)"' if both else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.6" marker-end="url(#head)"{start}{style}/>'
        )
        if words:
            (x1, y1), (x2, y2) = points[0], points[-1]
            x, y = at or ((x1 + x2) / 2, (y1 + y2) / 2 - 7)
            for i, line in enumerate(words.split("\n")):
                self.text(x, y + 15 * i, line, anchor, size=12, color=LINE)
        return self

    def line(self, x1, y1, x2, y2, width=1.6, color=LINE):
        stroke = f'stroke="{color}" stroke-width="{width}"'
        self.parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {stroke}/>')
        return self

    def write(self) -> None:
        def marker(name, path):
            return (
                f'<marker id="{name}" viewBox="0 0 10 10" refX="{9 if name == "head" else 1}" refY="5" markerWidth="7" '
                f'markerHeight="7" orient="auto"><path d="{path}" fill="{LINE}"/></marker>'
            )

        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        top = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif">'
        markers = marker("head", "M0 0 L10 5 L0 10 z") + marker("back", "M10 0 L0 5 L10 10 z")
        back = '<rect width="100%" height="100%" rx="8" fill="white"/>'
        body = "\n".join([top, f"<defs>{markers}</defs>", back, *self.parts, "</svg>"])
        (HERE / f"{self.name}.svg").write_text(body + "\n")


def overview() -> None:
    d = Drawing("overview", 720, 190)
    d.box(20, 24, 120, 52, "env\n(many lanes)", "sand").box(20, 110, 120, 52, "policy", "teal")
    d.box(220, 60, 150, 64, "Collector\nsteps, records", "grey", bold=True)
    d.box(540, 60, 150, 64, "your loop\ntrains the policy", "white")
    d.arrow((140, 50), (218, 82)).arrow((140, 136), (218, 104))
    d.arrow((370, 82), (538, 82), words="batch [lanes, time]")
    d.arrow((615, 124), (615, 172), (80, 172), (80, 164), words="new weights", at=(360, 166))
    d.write()


def processes() -> None:
    d = Drawing("processes", 720, 300)
    d.text(20, 24, "MultiSyncCollector", bold=True).text(170, 24, "each batch holds a rollout of every worker")
    d.box(20, 40, 150, 36, "worker 0: lanes 0–3", "sand").box(20, 86, 150, 36, "worker 1: lanes 4–7", "sand")
    d.box(250, 50, 150, 62, "one slot in\nshared memory", "grey").box(
        520, 56, 170, 50, "batch\n[workers, lanes, time]", "teal"
    )
    d.arrow((170, 58), (248, 70)).arrow((170, 104), (248, 92)).arrow((400, 81), (518, 81), words="no copy")
    d.line(20, 144, 700, 144, 1, "#cfd8dc")
    d.text(20, 168, "MultiAsyncCollector", bold=True).text(180, 168, "each batch is of one worker, the first one ready")
    d.box(20, 184, 150, 36, "worker 0", "sand").box(20, 230, 150, 36, "worker 1", "sand")
    d.box(250, 184, 150, 36, "slots of worker 0", "grey").box(250, 230, 150, 36, "slots of worker 1", "grey")
    d.box(520, 200, 170, 50, "batch\n[lanes, time]", "teal")
    d.arrow((170, 202), (248, 202)).arrow((170, 248), (248, 248))
    d.arrow((400, 202), (518, 218)).arrow((400, 248), (518, 234))
    d.text(
        20,
        290,
        "Weights: update_policy_weights_() writes one block; each worker reads it before its next rollout.",
        size=12,
        color=LINE,
    )
    d.write()


def parallel_env() -> None:
    d = Drawing("parallel-env", 720, 150)
    d.box(20, 45, 130, 60, "policy\n(this process)", "teal")
    d.box(230, 45, 130, 60, "row t of the slot\n(shared memory)", "grey", size=12)
    d.box(500, 20, 190, 44, "process 0: lanes 0–3", "sand").box(500, 86, 190, 44, "process 1: lanes 4–7", "sand")
    d.arrow((150, 75), (228, 75), words="actions")
    d.arrow((360, 64), (498, 42), both=True).arrow((360, 86), (498, 108), both=True)
    d.text(430, 80, "step row t", "middle", size=12, color=LINE)
    d.write()


def batched() -> None:
    d = Drawing("batched-inference", 720, 330)
    d.text(20, 24, "AsyncBatchedCollector", bold=True)
    d.box(20, 40, 190, 90, "this process\nthe policy is part of\nthe collecting loop", "teal")
    for i, name in enumerate(("env 0", "env 1", "env 2")):
        d.box(420, 36 + 34 * i, 130, 28, name, "sand")
    d.text(565, 70, "threads or", size=12, color=LINE).text(565, 86, "processes", size=12, color=LINE)
    d.arrow((210, 70), (418, 70), words="actions").arrow((418, 100), (210, 100), words="envs that are ready")
    d.text(
        20,
        152,
        "Frames are delivered in order of arrival: a batch [frames_per_batch] with env_index.",
        size=12,
        color=LINE,
    )
    d.line(20, 170, 700, 170, 1, "#cfd8dc")
    d.text(20, 194, "InferenceServer", bold=True)
    d.box(20, 210, 190, 90, "this process\none thread: few calls\nof the policy, many rows", "teal")
    for i, name in enumerate(("thread: client(td)", "process: client(td)", "process: client(td)")):
        d.box(420, 206 + 34 * i, 160, 28, name, "sand")
    d.arrow((418, 240), (210, 240), words="requests").arrow((210, 270), (418, 270), words="answers")
    d.write()


def background() -> None:
    d = Drawing("background", 720, 190)
    d.box(20, 30, 150, 40, "worker 0", "sand").box(20, 90, 150, 40, "worker 1", "sand")
    d.box(270, 46, 150, 68, "replay buffer\n(shared memory)", "grey")
    d.box(540, 46, 150, 68, "your loop\nlearns", "teal")
    d.arrow((170, 50), (268, 70), words="write").arrow((170, 110), (268, 92))
    d.arrow((420, 80), (538, 80), words="sample()")
    d.arrow((615, 114), (615, 168), (95, 168), (95, 132), words="update_policy_weights_()", at=(355, 162))
    d.write()


def limiter() -> None:
    d = Drawing("limiter", 720, 120)
    d.text(360, 22, "inserted × ratio − sampled: the number of samples the learner is behind", "middle")
    d.box(20, 40, 190, 36, "sample() waits", "sand").box(210, 40, 300, 36, "both continue", "teal")
    d.box(510, 40, 190, 36, "the collector rests", "sand")
    for x, words in ((210, "−tolerance"), (360, "0"), (510, "+tolerance")):
        d.line(x, 76, x, 86).text(x, 102, words, "middle", size=12)
    d.write()


def ring() -> None:
    d = Drawing("ring", 720, 110)
    d.box(20, 34, 110, 34, "overwritten", "white", dash=True, size=12).box(130, 34, 330, 34, "may be sampled", "teal")
    d.box(460, 34, 140, 34, "being written", "sand").box(600, 34, 100, 34, "free", "white", dash=True, size=12)
    for x, words in ((130, "head − capacity"), (460, "frontier"), (600, "head")):
        d.line(x, 68, x, 78).text(x, 94, words, "middle", size=12)
    d.text(
        360,
        22,
        "positions grow without limit; the row of a position is position mod capacity",
        "middle",
        size=12,
        color=LINE,
    )
    d.write()


def runs() -> None:
    d = Drawing("runs", 720, 170)
    d.text(20, 44, "rows", size=12).text(20, 92, "slices", size=12).text(20, 140, "steps ahead", size=12)
    d.box(110, 26, 200, 28, "episode 7", "teal", size=12).box(314, 26, 90, 28, "episode 8", "sand", size=12)
    d.box(408, 26, 60, 28, "hole", "white", dash=True, size=12).box(472, 26, 110, 28, "episode 8", "sand", size=12)
    d.box(586, 26, 114, 28, "another writer", "grey", size=12)
    d.box(150, 76, 100, 24, "slice_len", "teal", size=12).box(478, 76, 100, 24, "slice_len", "sand", size=12)
    d.arrow((130, 134), (220, 134), words="n steps").arrow((340, 134), (402, 134), words="to the end of the run")
    d.write()


def recurrent() -> None:
    d = Drawing("recurrent", 720, 150)
    d.text(20, 48, "step t").text(20, 118, "step t + 1")
    d.box(110, 24, 150, 40, "hidden, is_init", "grey").box(330, 24, 110, 40, "policy", "teal")
    d.box(510, 24, 180, 40, '("next", "hidden")', "grey").box(110, 94, 150, 40, "hidden, is_init", "grey")
    d.arrow((260, 44), (328, 44)).arrow((440, 44), (508, 44))
    d.arrow((600, 64), (600, 114), (262, 114), words="copied; the initial value where a lane was reset", at=(430, 132))
    d.write()


def adapters() -> None:
    d = Drawing("adapters", 720, 250)
    left = (
        "Gymnasium env, id or factory",
        "Gymnasium vector env",
        "TorchRL env",
        "EnvPool",
        "PettingZoo, dm_env",
        "envs in torch or JAX",
        "PufferLib style",
    )
    for i, words in enumerate(left):
        y = 14 + 33 * i
        d.box(20, y, 220, 26, words, "sand", size=12).arrow((240, y + 13), (338, 125))
    d.box(340, 95, 130, 60, "lanes\nrows of one form", "grey", bold=True).arrow((470, 125), (558, 125))
    d.box(560, 95, 130, 60, "Collector", "teal", bold=True)
    d.write()


def turns() -> None:
    d = Drawing("turns", 720, 150)
    for x, words in ((190, "agent 0 moves"), (360, "agent 1 moves"), (560, "agent 0 moves again")):
        d.text(x, 24, words, "middle", size=12, color=LINE)
    d.text(20, 64, "lane of agent 0").text(20, 118, "lane of agent 1")
    d.box(140, 42, 100, 34, "obs, action", "teal", size=12).box(
        500, 42, 180, 34, "next obs, sum of rewards", "teal", size=12
    )
    d.box(310, 96, 100, 34, "obs, action", "sand", size=12).arrow((240, 59), (498, 59), words="one frame of agent 0")
    d.arrow((410, 113), (680, 113), words="one frame of agent 1")
    d.write()


def devices() -> None:
    d = Drawing("devices", 720, 250)
    d.text(20, 22, "Envs on the CPU, policy on the GPU", bold=True)
    d.text(20, 62, "CPU", size=12).text(20, 108, "GPU", size=12)
    d.box(70, 40, 120, 34, "lanes", "sand").box(250, 40, 140, 34, "row (pinned)", "grey").box(
        560, 40, 130, 34, "row", "grey"
    )
    d.box(330, 92, 190, 34, "policy, as one graph", "teal")
    d.arrow((190, 57), (248, 57)).arrow((320, 74), (320, 109), (328, 109)).arrow(
        (520, 109), (625, 109), (625, 76), words="one wait per step", at=(560, 142)
    )
    d.line(20, 150, 700, 150, 1, "#cfd8dc")
    d.text(20, 172, "Env and policy on the GPU", bold=True).text(20, 212, "GPU", size=12)
    d.box(70, 190, 110, 34, "policy", "teal").box(250, 190, 110, 34, "env.step", "sand").box(
        430, 190, 110, 34, "rows", "grey"
    )
    d.arrow((180, 207), (248, 207), words="action").arrow((360, 207), (428, 207))
    d.arrow((305, 224), (305, 240), (125, 240), (125, 226))
    d.text(560, 204, "T steps are", size=12, color=LINE).text(560, 219, "one graph", size=12, color=LINE)
    d.write()


def remote() -> None:
    d = Drawing("remote", 720, 170)
    d.box(20, 60, 170, 50, "your program\nthe collector", "teal")
    rows = (
        ("DistributedCollector", "torch.distributed (gloo)"),
        ("RPCCollector", "torch.distributed.rpc (TensorPipe)"),
        ("RayCollector", "Ray actors"),
    )
    for i, (name, words) in enumerate(rows):
        y = 16 + 50 * i
        d.arrow((190, 85), (268, y + 20), both=True)
        d.box(270, y, 170, 40, name, "grey", size=12).text(456, y + 25, words, size=12)
    d.write()


def ray() -> None:
    d = Drawing("ray", 720, 230)
    d.box(20, 16, 230, 198, "this process", "white", top=True, bold=True).box(
        440, 16, 260, 90, "node 1", "white", top=True, bold=True
    )
    d.box(440, 124, 260, 90, "node 2", "white", top=True, bold=True)
    d.box(40, 48, 190, 40, "RayCollector", "teal").box(40, 102, 190, 40, "weights: ray.put", "grey").box(
        40, 156, 190, 40, "buffer.sample()", "grey"
    )
    d.box(456, 46, 110, 44, "actor 0\n(a worker)", "sand", size=12).box(576, 46, 110, 44, "actor 1", "sand", size=12)
    d.box(456, 154, 110, 44, "actor 2", "sand", size=12).box(576, 154, 110, 44, "RayReplayBuffer", "grey", size=12)
    d.arrow((454, 68), (232, 68), words="a batch is one object", at=(345, 60))
    d.arrow((230, 122), (345, 122), (345, 150), (454, 166), words="pulled", at=(395, 138))
    d.arrow((630, 198), (630, 206), (345, 206), (345, 182), (232, 182), words="one object per sample", at=(345, 222))
    d.write()


def worker_and_slots() -> None:
    d = Drawing("design", 720, 200)
    d.box(20, 60, 110, 50, "consumer", "white").box(200, 60, 110, 50, "assemble", "grey").box(
        400, 60, 110, 50, "fill: the one\nhot loop", "teal", size=12
    )
    d.box(590, 30, 110, 40, "policy", "teal").box(590, 100, 110, 40, "env", "sand")
    d.arrow((398, 76), (312, 76), words="full slot").arrow((198, 85), (132, 85), words="batch")
    d.arrow((312, 98), (398, 98), words="free slot", at=(355, 128))
    d.arrow((588, 50), (512, 76), both=True).arrow((588, 120), (512, 96), both=True)
    d.arrow((75, 110), (75, 180), (712, 180), (712, 50), (702, 50), dash=True)
    d.text(360, 174, "weights: published by the consumer, read between rollouts", "middle", size=12, color=LINE)
    d.write()


def data_paths() -> None:
    d = Drawing("data-paths", 720, 430)
    rows = (
        ("one process", ["RolloutLoop.fill", "slot", "assemble", "batch"], "core.rollout, backends.inline"),
        (
            "synchronous",
            ["each worker fills its lanes", "one common slot", "assemble", "batch"],
            "backends.delivery",
        ),
        ("asynchronous", ["each worker", "a slot of its own", "assemble", "batch"], "the first worker that is ready"),
        (
            "into a buffer",
            ["worker", "slot", "rows of the ring", "sample"],
            "collectors.buffer_writers, backends.background_runner",
        ),
        (
            "batched",
            ["envs that are ready", "one row", "one policy", "frames"],
            "envs.parallel, collectors.batched, core.lanes",
        ),
        ("remote", ["RemoteWorker fills a block", "Ray, RPC, gloo", "slot, assemble", "batch"], "backends.remote"),
    )
    for i, (name, boxes, where) in enumerate(rows):
        y = 14 + 69 * i
        d.text(12, y + 22, name, bold=True, size=12)
        x = 130
        for j, words in enumerate(boxes):
            w = (190, 130, 110, 92)[j]
            d.box(x, y, w, 34, words, ("sand", "grey", "grey", "teal")[j], size=12)
            if j:
                d.arrow((x - 18, y + 17), (x - 1, y + 17))
            x += w + 19
        d.text(130, y + 50, where, size=11, color=LINE)
    d.write()


def hot_loop() -> None:
    d = Drawing("hot-loop", 720, 170)
    d.box(20, 40, 110, 40, "row 0", "grey").box(210, 40, 130, 40, "policy.act", "teal").box(
        400, 40, 110, 40, "env.step", "sand"
    )
    d.box(560, 40, 140, 40, "next, reward, flags", "grey", size=12)
    d.arrow((130, 60), (208, 60), words="row t").arrow((340, 60), (398, 60)).arrow((510, 60), (558, 60))
    d.arrow((630, 80), (630, 130), (75, 130), (75, 82), words="the successor is copied to row t + 1", at=(350, 122))
    d.text(
        350,
        152,
        "a lane that ended is reset into that row instead; after the last row, the successor begins the next rollout",
        "middle",
        size=12,
        color=LINE,
    )
    d.write()


def slots() -> None:
    d = Drawing("slots", 720, 110)
    for i, (words, fill) in enumerate((("FREE", "white"), ("WRITING", "sand"), ("FULL", "grey"), ("READING", "teal"))):
        d.box(20 + 190 * i, 24, 110, 36, words, fill, bold=True)
    d.arrow((130, 42), (208, 42), words="acquire").arrow((320, 42), (398, 42)).arrow((510, 42), (588, 42), words="lend")
    d.arrow((645, 60), (645, 92), (75, 92), (75, 62), words="the last tensor is freed", at=(360, 86))
    d.write()


def worker_processes() -> None:
    d = Drawing("worker-processes", 720, 150)
    d.box(20, 40, 150, 56, "this process\ntake", "teal").box(290, 14, 170, 50, "fork server\n(torch imported)", "grey")
    d.box(560, 40, 140, 56, "worker: the same\nloop", "sand", size=12)
    d.arrow((150, 39), (288, 30), words="request", at=(220, 26)).arrow((460, 36), (558, 52), words="fork")
    d.arrow((558, 78), (172, 78), words="“full”").arrow(
        (120, 96),
        (120, 126),
        (630, 126),
        (630, 98),
        words="slot number, when the last tensor is freed: the free pipe",
        at=(370, 142),
    )
    d.write()


def backends() -> None:
    d = Drawing("backends", 720, 240)
    d.box(20, 80, 150, 50, "WorkerBackend.take", "teal", size=12)
    d.box(240, 20, 150, 44, "Delivery", "grey", bold=True).box(240, 150, 150, 44, "Supervisor", "grey", bold=True)
    d.text(404, 36, "which rollouts form a batch, and when a slot", size=12).text(
        404, 52, "is free again: InStep, AsReady, IntoBuffer", size=12
    )
    d.text(404, 166, "pending requests, answers,", size=12).text(404, 182, "and failed workers", size=12)
    d.arrow((170, 96), (238, 46)).arrow((170, 114), (238, 168))
    d.arrow((315, 194), (315, 222), (400, 222))
    d.text(408, 218, "Transport: SharedMemoryTransport, GlooTransport,", size=12)
    d.text(408, 233, "RayActorTransport, TensorPipeTransport", size=12)
    d.write()


def into_a_buffer() -> None:
    d = Drawing("into-a-buffer", 720, 120)
    for i, words in enumerate(("rollout", "batch", "split", "postproc", "hook")):
        d.box(16 + 104 * i, 40, 80, 36, words, "grey", size=12)
        if i:
            d.arrow((16 + 104 * i - 24, 58), (16 + 104 * i - 2, 58))
    d.box(580, 14, 124, 36, "consumer", "teal", size=12).box(580, 70, 124, 36, "buffer", "sand", size=12)
    d.arrow((512, 52), (578, 34)).arrow((512, 64), (578, 88))
    d.write()


def main() -> None:
    for draw in (
        *(overview, processes, parallel_env, batched, background, limiter, ring, runs, recurrent, adapters, turns),
        *(devices, remote, ray, worker_and_slots, data_paths, hot_loop, slots, worker_processes, backends),
        into_a_buffer,
    ):
        draw()


if __name__ == "__main__":
    main()
