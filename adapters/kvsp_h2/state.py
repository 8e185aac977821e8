"""The state of a connection that the library ``h2`` keeps, set up for what is done here without it."""

from __future__ import annotations

from h2.config import H2Configuration
from h2.connection import ConnectionInputs, H2Connection
from h2.settings import SettingCodes, Settings

from kvsp_h2.limits import WireLimits

__all__ = ["start_protocol"]


def start_protocol(limits: WireLimits, *, client: bool) -> H2Connection:
    """Return what h2 keeps of a connection, its SETTINGS ready to be sent.

    Fields are checked by `kvsp_h2.fields`, which is faster and ends a stream where h2 ends the connection.
    """
    protocol = H2Connection(
        H2Configuration(
            client_side=client,
            header_encoding=False,
            validate_inbound_headers=False,
            validate_outbound_headers=False,
            normalize_inbound_headers=False,
            normalize_outbound_headers=False,
        )
    )
    ours = {
        SettingCodes.ENABLE_PUSH: 0,
        SettingCodes.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
        SettingCodes.MAX_FRAME_SIZE: limits.max_frame_bytes,
        SettingCodes.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
    }
    if not client:
        ours[SettingCodes.MAX_CONCURRENT_STREAMS] = limits.max_streams
    protocol.local_settings = Settings(client=client, initial_values=ours)
    protocol.max_inbound_frame_size = limits.max_frame_bytes
    protocol.decoder.max_header_list_size = limits.max_header_block_bytes
    protocol.initiate_connection()
    opened = ConnectionInputs.SEND_HEADERS if client else ConnectionInputs.RECV_HEADERS
    protocol.state_machine.process_input(opened)
    return protocol
