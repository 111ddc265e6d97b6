"""The server: `FedDDStrategy(FedDD(...), Net())` stands where `FedAvg()` stood."""

from __future__ import annotations

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from feddd import FedDD
from feddd.flower import FedDDStrategy, RoundFacts
from flower_app.task import Net, accuracy, load_test_data

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds, and say what each one cost."""
    config = context.run_config
    images, labels = load_test_data()

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        model = Net()
        model.load_state_dict(arrays.to_torch_state_dict())
        found = accuracy(model, images, labels)
        print(f"round {number}: accuracy {found:.3f}", flush=True)
        return MetricRecord({"accuracy": found})

    def tell(facts: RoundFacts) -> None:
        sent = sum(upload.upload_bytes for upload in facts.uploads)
        rates = ", ".join(f"{rate:.2f}" for rate in facts.dropout.values())
        print(f"round {facts.round}: {facts.seconds:.1f} s, {sent} bytes up, dropout {rates}", flush=True)

    strategy = FedDDStrategy(
        FedDD(budget=float(config["budget"])),
        Net(),
        deadline_seconds=float(config["deadline-seconds"]),
        on_round=tell,
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=int(config["rounds"]),
        train_config=ConfigRecord({"learning-rate": float(config["learning-rate"])}),
        evaluate_fn=evaluate,
    )
