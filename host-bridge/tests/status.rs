//! What `host-bridge status` shows to people.

use host_bridge::status::{DeviceStatus, GuestStatus, Status, table};
use venet::counters::Values;

#[test]
fn the_table_tells_of_quarantine_and_violations() {
    let mac = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
    let device = DeviceStatus {
        link: "quarantined".into(),
        counters: Values { violations: 4711, ..Values::default() },
        ..DeviceStatus::idle("venet0", Some("vb-g1".into()), Some("br0".into()), mac, 1500)
    };
    let guest = GuestStatus {
        name: "g1".into(),
        socket: "/run/vbus/g1.sock".into(),
        connected: true,
        connections: 1,
        resets: 2,
        quarantines: 3,
        devices: vec![device],
    };
    let status = Status { version: "0.1.0".into(), supervisor: 10, data_process: 11, guests: vec![guest] };
    let table = table(&status);
    for expected in [
        "host-bridge 0.1.0, supervisor 10, data process 11",
        "guest g1 at /run/vbus/g1.sock: connected, 1 connections, 2 resets, 3 quarantines",
        "venet0: link quarantined, tap vb-g1 on br0, mac 52:54:00:12:34:56, mtu 1500, offloads none",
        "violations 4711",
    ] {
        assert!(table.contains(expected), "{expected:?} is not in:\n{table}");
    }
}
