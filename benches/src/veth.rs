//! A veth pair, over rtnetlink: the kernel has no older interface for creating one.
//!
//! Source: `rtnetlink(7)`, and `VETH_INFO_PEER` in the kernel's `include/uapi/linux/veth.h`.

use anyhow::{Context, Result, bail};
use netlink_packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{InfoData, InfoKind, InfoVeth, LinkAttribute, LinkInfo, LinkMessage};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::os::fd::{AsRawFd, BorrowedFd};

/// Creates `name` in the calling thread's network namespace and `peer` in the namespace `other`.
pub fn create(name: &str, peer: &str, other: BorrowedFd<'_>) -> Result<()> {
    let mut far = LinkMessage::default();
    far.attributes = vec![LinkAttribute::IfName(peer.into()), LinkAttribute::NetNsFd(other.as_raw_fd())];
    let mut near = LinkMessage::default();
    near.attributes = vec![
        LinkAttribute::IfName(name.into()),
        LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(far))),
        ]),
    ];
    let mut message = NetlinkMessage::from(RouteNetlinkMessage::NewLink(near));
    message.header.flags = NLM_F_REQUEST | NLM_F_CREATE | NLM_F_EXCL | NLM_F_ACK;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);

    let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    rustix::net::send(&socket, &bytes, SendFlags::empty()).context("cannot ask the kernel for a veth pair")?;
    let mut answer = vec![0; 8192];
    let (length, _) = rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty())?;
    let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(answer.get(..length).unwrap_or_default())
        .context("cannot understand the kernel's answer about a veth pair")?;
    match answer.payload {
        NetlinkPayload::Error(error) if error.code.is_some() => {
            Err(error.to_io()).with_context(|| format!("cannot create the veth pair {name} and {peer}"))
        }
        NetlinkPayload::Error(_) => Ok(()),
        other => bail!("the kernel answered something else about a veth pair: {other:?}"),
    }
}
