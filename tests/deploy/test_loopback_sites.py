"""Three clients with tables of their own, in real processes: the model of the joined table."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from fedshift.errors import InputError
from support.loopback import gone, loopback, processes
from support.own_sites import FILE, joined, places, resolved, together


@pytest.mark.slow
@pytest.mark.few(1)
def test_three_clients_with_tables_of_their_own(tmp_path: Path) -> None:
    table, text = joined(), FILE.replace("evaluate_every = 1", "evaluate_every = 2")
    folder, sites = tmp_path / "federation", places(tmp_path / "sites", table, text)
    here = together(tmp_path, table, text)
    with loopback(folder, resolved(tmp_path, text), 3) as fed:
        for client, site in enumerate(sites):
            shutil.copytree(site, fed.place(client), dirs_exist_ok=True)
        data = fed.place(1) / "data.csv"
        data.write_text(data.read_text().replace("marker", "secret", 1))
        for client in range(3):
            fed.join(client)
        with pytest.raises(InputError, match='"east": column "marker" is missing') as e:
            fed.play(tmp_path / "refused")
        assert "secret" not in str(e.value)
        assert "secret" in (fed.place(1) / "supernode.log").read_text()
        data.write_text(data.read_text().replace("secret", "marker", 1))
        fed.play(tmp_path / "there", patience=300.0, timeout=300.0)
    assert gone(str(folder)), processes(str(folder))
    for name in ("model.safetensors", "encoding.json", "clients.csv"):
        assert (here / name).read_bytes() == (tmp_path / "there" / name).read_bytes(), name
