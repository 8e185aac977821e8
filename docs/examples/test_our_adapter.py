"""An example of a user's own property tests: what our adapter stores has to come back."""

from hypothesis import HealthCheck, given, settings

from kvsp_core.bodies import decode, encode
from kvsp_core.records import ReplicaRecord
from kvsp_sim.strategies.messages import replica_records


class OurDatabase:
    """Stands for the store that is to be tested: here it keeps rows of JSON."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], bytes] = {}

    def put(self, record: ReplicaRecord) -> None:
        """Keep a record."""
        self._rows[record.holder, record.block_key] = encode(record)

    def get(self, holder: str, block_key: str) -> ReplicaRecord:
        """Return a record."""
        return decode(ReplicaRecord, self._rows[holder, block_key])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a runner may be slow
@given(replica_records())
def test_a_record_comes_back(record: ReplicaRecord) -> None:
    """Every record that the protocol allows survives our database."""
    database = OurDatabase()
    database.put(record)
    assert database.get(record.holder, record.block_key) == record
