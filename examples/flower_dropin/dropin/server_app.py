"""The server: Flower's quick-start, with two lines changed for FedPALS."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

from dropin.task import TARGET, accuracy, network, target_data
from fedshift.flower import FedPALS  # the first line

app = ServerApp()


def strategy_of(name: str) -> Strategy:
    """FedPALS, or what it replaces."""
    if name == "fedavg":
        return FedAvg(fraction_evaluate=0.0)
    return FedPALS(TARGET, ess=0.4, inner=FedAvg(fraction_evaluate=0.0))  # the second line


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and test where the model will be used."""
    x, y = target_data()

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        net = network()
        net.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({"target-accuracy": accuracy(net, x, y)})

    result = strategy_of(str(context.run_config["strategy"])).start(
        grid=grid,
        initial_arrays=ArrayRecord(network().state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
        evaluate_fn=evaluate,
    )
    last = max(result.evaluate_metrics_serverapp)
    found = result.evaluate_metrics_serverapp[last]["target-accuracy"]
    context.state["result"] = MetricRecord({"target-accuracy": float(found)})
    print(f"accuracy at the target after round {last}: {100 * found:.1f} %")
