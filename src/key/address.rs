//! Keys that are network addresses: the peer's, or the client's behind proxies.

use super::{
    Key, KeyError, KeyExtractor,
    forwarded::{self, Hop},
};
#[cfg(feature = "axum")]
use axum::extract::{ConnectInfo, connect_info::MockConnectInfo};
use http::{Extensions, HeaderName, request::Parts};
use ipnet::IpNet;
use std::{
    borrow::Cow,
    error, fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
};
#[cfg(feature = "tonic")]
use tonic::transport::server::TcpConnectInfo;

/// The address at the other end of a connection, as a request extension.
///
/// With axum and tonic the address is found without it. Under plain hyper, or behind a listener
/// that learns the address in its own way (the PROXY protocol), put it into each request before
/// the rate limit sees it; it is preferred to what axum and tonic tell:
///
/// ```
/// use http::Request;
/// use std::net::SocketAddr;
/// use tollgate::key::PeerAddr;
///
/// // `peer` is what `TcpListener::accept` returned beside the stream.
/// fn with_peer<B>(mut request: Request<B>, peer: SocketAddr) -> Request<B> {
///     request.extensions_mut().insert(PeerAddr(peer));
///     request
/// }
/// ```
///
/// The peers of a Unix socket have no address. If only a proxy on the same host can connect to
/// it, say that it has the loopback address, and name that as trusted in [`ClientIp`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerAddr(pub SocketAddr);

/// Counts by the address at the other end of the connection.
///
/// Behind a proxy that is the proxy's address, the same for everybody: use [`ClientIp`] there.
///
/// One host usually has a whole IPv6 /64 to itself, so IPv6 addresses are counted by their /64;
/// IPv4 addresses are counted one by one. An IPv6 address that maps an IPv4 one is that IPv4
/// address.
///
/// The address is taken from the first of these request extensions that is there: [`PeerAddr`];
/// axum's `ConnectInfo<SocketAddr>` and `MockConnectInfo<SocketAddr>` (feature `axum`); tonic's
/// `TcpConnectInfo`, which its TLS connections have too (feature `tonic`). Without any, there is
/// no key, and the error says what to set up.
///
/// ```
/// use http::Request;
/// use tollgate::key::{KeyExtractor, PeerAddr, PeerIp};
///
/// let key_of = |address: &str| {
///     let peer = PeerAddr(address.parse().unwrap());
///     let (parts, ()) = Request::builder().extension(peer).body(()).unwrap().into_parts();
///     PeerIp::new().extract(&parts).unwrap()
/// };
/// assert_eq!(key_of("[2001:db8::1]:50000"), key_of("[2001:db8::2]:50001"));
/// assert_ne!(key_of("192.0.2.1:50000"), key_of("192.0.2.2:50000"));
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct PeerIp {
    prefixes: Prefixes,
}

impl PeerIp {
    /// Counts IPv6 by /64, IPv4 by /32.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// How many leading bits of an IPv6 address are counted: 64 if not set. 56 or 48 count a
    /// customer of most providers as one, however many networks they hand out. More than 128 is
    /// the same as 128, the whole address.
    #[must_use]
    pub fn ipv6_prefix(mut self, bits: u8) -> Self {
        self.prefixes.v6 = bits.min(128);
        self
    }

    /// How many leading bits of an IPv4 address are counted: 32, the whole address, if not set.
    /// More than 32 is the same as 32.
    #[must_use]
    pub fn ipv4_prefix(mut self, bits: u8) -> Self {
        self.prefixes.v4 = bits.min(32);
        self
    }

    /// The whole address, whatever the prefixes are.
    ///
    /// # Errors
    ///
    /// [`KeyErrorKind::Misconfigured`](super::KeyErrorKind::Misconfigured) if the request
    /// extensions have no address.
    pub fn address(&self, parts: &Parts) -> Result<IpAddr, KeyError> {
        peer(parts)
    }
}

impl KeyExtractor for PeerIp {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        Ok(self.prefixes.key(self.address(parts)?))
    }

    fn name(&self) -> Option<Cow<'static, str>> {
        // The debug form has every field.
        Some(format!("{self:?}").into())
    }
}

/// Counts by the client's address, as proxies that you name tell it.
///
/// Anyone can send an `X-Forwarded-For` header, so a header is believed only as far as it was
/// written by proxies that are trusted. From the peer's address on, as long as an address is a
/// trusted one, the next entry from the right says who called it; the first address that is not
/// trusted is the client's. What stands left of it may be forged and is not looked at.
///
/// - A peer that is not trusted is the client, whatever its headers say.
/// - An entry that is malformed, empty, `unknown` or obfuscated (`_name`) ends the walk: the
///   client is the proxy that wrote it.
/// - If all are trusted, the leftmost is the client. No more than 32 entries from the right, of
///   no more than 1,024 bytes each, are read.
/// - All lines of the header are one list. No other header is looked at: a header that your
///   proxies do not write is the client's to write.
///
/// In `X-Forwarded-For` and in headers with a single address, that may have a port: `192.0.2.1`,
/// `192.0.2.1:80`, `2001:db8::1`, `[2001:db8::1]`, `[2001:db8::1]:80`.
///
/// Where the proxies' addresses are not known, but their number is, count them instead:
/// [`x_forwarded_for_hops`](Self::x_forwarded_for_hops), [`forwarded_hops`](Self::forwarded_hops).
///
/// Addresses are counted by the same prefixes as in [`PeerIp`], and the peer's is found in the
/// same places.
///
/// ```
/// use http::Request;
/// use tollgate::key::{ClientIp, Networks, PeerAddr};
///
/// let client = ClientIp::x_forwarded_for(Networks::new(["10.0.0.0/8"])?);
///
/// let request = Request::builder()
///     .extension(PeerAddr("10.0.0.2:50000".parse()?))
///     .header("x-forwarded-for", "6.6.6.6, 203.0.113.9, 10.0.0.1")
///     .body(())?;
/// let (parts, ()) = request.into_parts();
/// assert_eq!(client.address(&parts)?.to_string(), "203.0.113.9");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ClientIp {
    source: Source,
    trust: Trust,
    prefixes: Prefixes,
}

/// Where proxies write who called them.
#[derive(Clone, Debug)]
enum Source {
    XForwardedFor,
    Forwarded,
    Header(HeaderName),
    CloudFront,
}

/// Which proxies are believed.
#[derive(Clone, Debug)]
enum Trust {
    Networks(Networks),
    Hops(usize),
}

impl ClientIp {
    /// The client in `X-Forwarded-For`, as told by proxies with these addresses.
    #[must_use]
    pub fn x_forwarded_for(proxies: Networks) -> Self {
        Self::new(Source::XForwardedFor, Trust::Networks(proxies))
    }

    /// The client in `X-Forwarded-For` behind this many proxies, of which each adds an entry and
    /// the last is the peer. With 1, the client is the rightmost entry.
    ///
    /// The number must be right for every way that leads to this server: too large a number
    /// believes what clients write. With fewer entries than proxies, the peer is the client, and so
    /// it is with 0 proxies or more than 32.
    #[must_use]
    pub fn x_forwarded_for_hops(proxies: usize) -> Self {
        Self::new(Source::XForwardedFor, Trust::Hops(proxies))
    }

    /// The client in `Forwarded` (RFC 7239), as told by proxies with these addresses.
    #[must_use]
    pub fn forwarded(proxies: Networks) -> Self {
        Self::new(Source::Forwarded, Trust::Networks(proxies))
    }

    /// The client in `Forwarded` behind this many proxies; see
    /// [`x_forwarded_for_hops`](Self::x_forwarded_for_hops).
    #[must_use]
    pub fn forwarded_hops(proxies: usize) -> Self {
        Self::new(Source::Forwarded, Trust::Hops(proxies))
    }

    /// The client in a header that holds one address, such as `X-Real-IP` or `CF-Connecting-IP`,
    /// as told by proxies with these addresses.
    ///
    /// The proxies must overwrite the header, not pass on what clients send. If it comes in
    /// several lines or with several addresses, the peer is the client.
    #[must_use]
    pub fn header(name: HeaderName, proxies: Networks) -> Self {
        Self::new(Source::Header(name), Trust::Networks(proxies))
    }

    /// The client in `CloudFront-Viewer-Address`, which writes a port after an IPv6 address
    /// without brackets, as told by proxies with these addresses.
    #[must_use]
    pub fn cloudfront(proxies: Networks) -> Self {
        Self::new(Source::CloudFront, Trust::Networks(proxies))
    }

    fn new(source: Source, trust: Trust) -> Self {
        Self { source, trust, prefixes: Prefixes::default() }
    }

    /// How many leading bits of an IPv6 address are counted: 64 if not set. More than 128 is the
    /// same as 128, the whole address.
    #[must_use]
    pub fn ipv6_prefix(mut self, bits: u8) -> Self {
        self.prefixes.v6 = bits.min(128);
        self
    }

    /// How many leading bits of an IPv4 address are counted: 32, the whole address, if not set.
    /// More than 32 is the same as 32.
    #[must_use]
    pub fn ipv4_prefix(mut self, bits: u8) -> Self {
        self.prefixes.v4 = bits.min(32);
        self
    }

    /// The client's whole address, whatever the prefixes are.
    ///
    /// # Errors
    ///
    /// [`KeyErrorKind::Misconfigured`](super::KeyErrorKind::Misconfigured) if the request
    /// extensions do not have the peer's address. No header is an error.
    pub fn address(&self, parts: &Parts) -> Result<IpAddr, KeyError> {
        let peer = peer(parts)?;
        let headers = &parts.headers;
        Ok(match &self.source {
            Source::XForwardedFor => self.trust.client(peer, forwarded::x_forwarded_for(headers)),
            Source::Forwarded => self.trust.client(peer, forwarded::forwarded(headers)),
            Source::Header(name) => self.trust.client(peer, forwarded::single(headers, name)),
            Source::CloudFront => self.trust.client(peer, forwarded::cloudfront(headers)),
        })
    }
}

impl KeyExtractor for ClientIp {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        Ok(self.prefixes.key(self.address(parts)?))
    }

    fn name(&self) -> Option<Cow<'static, str>> {
        // The debug form has every field.
        Some(format!("{self:?}").into())
    }
}

impl Trust {
    /// Walks from the peer towards the client while the proxies are trusted.
    fn client(&self, peer: IpAddr, mut hops: impl Iterator<Item = Hop>) -> IpAddr {
        let mut client = peer;
        let mut passed = 0;
        while self.covers(client, passed) {
            match hops.next() {
                Some(Some(hop)) => client = hop.to_canonical(),
                Some(None) => return client,
                None => {
                    return match self {
                        Self::Networks(_) => client,
                        Self::Hops(_) => peer,
                    };
                }
            }
            passed += 1;
        }
        client
    }

    fn covers(&self, address: IpAddr, passed: usize) -> bool {
        match self {
            Self::Networks(networks) => networks.contains(address),
            Self::Hops(proxies) => passed < *proxies,
        }
    }
}

/// A set of addresses, as a list of networks. A clone is cheap.
///
/// ```
/// use tollgate::key::Networks;
///
/// let networks = Networks::new(["10.0.0.0/8", "2001:db8::/32", "192.0.2.1"])?;
/// assert!(networks.contains("10.1.2.3".parse()?));
/// assert!(networks.contains("::ffff:10.1.2.3".parse()?));
/// assert!(!networks.contains("192.0.2.2".parse()?));
///
/// let error = Networks::new(["10.0.0.0/33"]).unwrap_err();
/// assert!(error.to_string().contains("10.0.0.0/33"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Networks(
    /// Sorted and merged, so that equal sets are equal lists.
    Arc<[IpNet]>,
);

/// Networks whose addresses are not routed on the internet.
const PRIVATE: [&str; 8] = [
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "::1/128",
    "fc00::/7",
    "fe80::/10",
];

impl Networks {
    /// The addresses in any of these networks: each an address with a prefix length, as in
    /// `10.0.0.0/8`, or an address alone. White space around it does not matter, nor do the bits
    /// after the prefix.
    ///
    /// An IPv6 network of addresses that map IPv4 ones, as in `::ffff:10.0.0.0/104`, is that IPv4
    /// network. Shorter IPv6 prefixes, such as `::/0`, hold no IPv4 address.
    ///
    /// # Errors
    ///
    /// [`NetworksError`] names the first text that is no network.
    pub fn new<I>(networks: I) -> Result<Self, NetworksError>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        let networks = networks
            .into_iter()
            .map(|text| network(text.as_ref().trim()))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self(IpNet::aggregate(&networks).into()))
    }

    /// The addresses that are not routed on the internet: private (RFC 1918), loopback, link-local
    /// and unique local ones.
    ///
    /// As trusted proxies these are a fit only where no client can have such an address. Naming
    /// the proxies' own networks is safer.
    #[must_use]
    pub fn private() -> Self {
        Self::new(PRIVATE).expect("the list above is well-formed")
    }

    /// Whether the address is in one of the networks. An IPv6 address that maps an IPv4 one is
    /// that IPv4 address.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.0.iter().any(|network| network.contains(&address))
    }
}

fn network(text: &str) -> Result<IpNet, NetworksError> {
    let network = strict_network(text).ok_or_else(|| NetworksError { text: text.into() })?;
    // No IPv4 network has a prefix of 96 bits.
    if let IpAddr::V4(address) = network.addr().to_canonical()
        && let Some(prefix) = network.prefix_len().checked_sub(96)
        && let Ok(mapped) = IpNet::new(address.into(), prefix)
    {
        return Ok(mapped);
    }
    Ok(network)
}

/// What some take for octal, an address with leading zeros, is no address to the standard library's
/// parser, but is one to that of [`IpNet`].
fn strict_network(text: &str) -> Option<IpNet> {
    let Some((address, prefix)) = text.split_once('/') else {
        return text.parse::<IpAddr>().ok().map(IpNet::from);
    };
    let digits = prefix.bytes().all(|byte| byte.is_ascii_digit());
    let prefix = prefix.parse().ok().filter(|_| digits)?;
    IpNet::new(address.parse().ok()?, prefix).ok()
}

/// A text that is no network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworksError {
    text: String,
}

impl fmt::Display for NetworksError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} is not a network: write an address with a prefix length, such as 10.0.0.0/8 or \
             2001:db8::/32, or an address alone",
            self.text
        )
    }
}

impl error::Error for NetworksError {}

/// How many leading bits of an address are counted.
#[derive(Clone, Copy, Debug)]
struct Prefixes {
    v4: u8,
    v6: u8,
}

impl Default for Prefixes {
    fn default() -> Self {
        Self { v4: 32, v6: 64 }
    }
}

impl Prefixes {
    /// The key of the network that the address is in.
    fn key(self, address: IpAddr) -> Key {
        match address {
            IpAddr::V4(address) => {
                let mask = u32::MAX.unbounded_shl(32 - u32::from(self.v4));
                Ipv4Addr::from_bits(address.to_bits() & mask).into()
            }
            IpAddr::V6(address) => {
                let mask = u128::MAX.unbounded_shl(128 - u32::from(self.v6));
                Ipv6Addr::from_bits(address.to_bits() & mask).into()
            }
        }
    }
}

/// The address at the other end of the connection.
fn peer(parts: &Parts) -> Result<IpAddr, KeyError> {
    match socket(&parts.extensions) {
        Some(socket) => Ok(socket.ip().to_canonical()),
        None => Err(KeyError::misconfigured(
            "the request does not have the peer's address: with axum, serve \
             `app.into_make_service_with_connect_info::<SocketAddr>()`, with tollgate's feature \
             `axum`; with tonic, serve TCP by `tonic::transport::Server`, with tollgate's feature \
             `tonic`; with hyper, insert `tollgate::key::PeerAddr` into the request's extensions",
        )),
    }
}

fn socket(extensions: &Extensions) -> Option<SocketAddr> {
    let socket = extensions.get().map(|PeerAddr(socket)| *socket);
    #[cfg(feature = "axum")]
    let socket = socket
        .or_else(|| extensions.get().map(|ConnectInfo(socket)| *socket))
        .or_else(|| extensions.get().map(|MockConnectInfo(socket)| *socket));
    #[cfg(feature = "tonic")]
    let socket = socket.or_else(|| extensions.get::<TcpConnectInfo>()?.remote_addr());
    socket
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::KeyErrorKind;
    use http::Request;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn parts(peer: &str, headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::new(());
        let peer = SocketAddr::new(peer.parse().unwrap(), 50_000);
        request.extensions_mut().insert(PeerAddr(peer));
        for (name, value) in headers {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            request.headers_mut().append(name, value.parse().unwrap());
        }
        request.into_parts().0
    }

    fn client(extractor: &ClientIp, peer: &str, headers: &[(&str, &str)]) -> String {
        let address = extractor.address(&parts(peer, headers));
        address.unwrap().to_string()
    }

    fn networks(list: &[&str]) -> Networks {
        Networks::new(list).unwrap()
    }

    fn xff(value: &str) -> [(&str, &str); 1] {
        [("x-forwarded-for", value)]
    }

    // === the peer ===

    #[test]
    fn a_host_does_not_get_a_budget_per_address_of_its_network() {
        let keys = |extractor: PeerIp| {
            let peers = [
                "2001:db8:1:2::1",
                "2001:db8:1:2::2",
                "2001:db8:1:2::3",
                "2001:db8:1:2::4",
                "2001:db8:1:3::1",
                "192.0.2.1",
                "192.0.2.2",
            ];
            let keys = peers.map(|peer| extractor.extract(&parts(peer, &[])).unwrap());
            HashSet::from(keys).len()
        };
        assert_eq!(keys(PeerIp::new()), 4);
        assert_eq!(keys(PeerIp::new().ipv6_prefix(48)), 3);
        assert_eq!(keys(PeerIp::new().ipv4_prefix(24)), 3);
        assert_eq!(keys(PeerIp::new().ipv6_prefix(128)), 7);
        assert_eq!(keys(PeerIp::new().ipv6_prefix(0).ipv4_prefix(0)), 2);
    }

    #[test]
    fn a_prefix_longer_than_the_address_is_the_whole_address() {
        let longest = PeerIp::new().ipv4_prefix(255).ipv6_prefix(255);
        for (a, b) in [("192.0.2.0", "192.0.2.1"), ("2001:db8::", "2001:db8::1")] {
            let key = |peer| longest.extract(&parts(peer, &[])).unwrap();
            assert_eq!(key(a), key(a));
            assert_ne!(key(a), key(b));
        }
        let exact = PeerIp::new().ipv4_prefix(32).ipv6_prefix(128);
        assert_eq!(KeyExtractor::name(&longest), KeyExtractor::name(&exact));
    }

    #[test]
    fn a_mapped_peer_is_the_address_it_maps() {
        let parts = parts("::ffff:192.0.2.1", &[]);
        assert_eq!(PeerIp::new().address(&parts).unwrap().to_string(), "192.0.2.1");
        let key = PeerIp::new().extract(&parts).unwrap();
        assert_eq!(key, Key::from(Ipv4Addr::new(192, 0, 2, 1)));
    }

    #[test]
    fn without_the_peers_address_there_is_no_key_but_advice() {
        let (mut parts, ()) = Request::new(()).into_parts();
        parts.headers.insert("x-forwarded-for", "192.0.2.1".parse().unwrap());
        for error in [
            PeerIp::new().extract(&parts).unwrap_err(),
            ClientIp::x_forwarded_for_hops(1).extract(&parts).unwrap_err(),
        ] {
            assert_eq!(error.kind(), KeyErrorKind::Misconfigured);
            let advice = error.to_string();
            assert!(advice.contains("into_make_service_with_connect_info::<SocketAddr>()"));
            assert!(advice.contains("tonic::transport::Server"));
            assert!(advice.contains("tollgate::key::PeerAddr"));
        }
    }

    #[cfg(feature = "axum")]
    #[test]
    fn the_peer_is_found_where_axum_puts_it() {
        let (mut parts, ()) = Request::new(()).into_parts();
        let socket = |host| SocketAddr::from(([192, 0, 2, host], 50_000));
        let address = |parts: &Parts| PeerIp::new().address(parts).unwrap();
        parts.extensions.insert(MockConnectInfo(socket(1)));
        assert_eq!(address(&parts), socket(1).ip());
        parts.extensions.insert(ConnectInfo(socket(2)));
        assert_eq!(address(&parts), socket(2).ip());
        parts.extensions.insert(PeerAddr(socket(3)));
        assert_eq!(address(&parts), socket(3).ip());
    }

    #[cfg(feature = "tonic")]
    #[test]
    fn the_peer_is_found_where_tonic_puts_it() {
        let (mut parts, ()) = Request::new(()).into_parts();
        let mut connection = TcpConnectInfo { local_addr: None, remote_addr: None };
        parts.extensions.insert(connection.clone());
        assert!(PeerIp::new().address(&parts).is_err());
        let peer = SocketAddr::from(([192, 0, 2, 1], 50_000));
        connection.remote_addr = Some(peer);
        parts.extensions.insert(connection);
        assert_eq!(PeerIp::new().address(&parts).unwrap(), peer.ip());
    }

    // === the client ===

    #[test]
    fn what_a_client_writes_left_of_the_truth_changes_nothing() {
        let extractor = ClientIp::x_forwarded_for(networks(&["10.0.0.0/8"]));
        for forged in ["1.1.1.1", "2.2.2.2", "3.3.3.3", "10.9.9.9", "", "\"", "unknown"] {
            let value = format!("{forged}, 203.0.113.9");
            assert_eq!(client(&extractor, "10.0.0.1", &xff(&value)), "203.0.113.9");
        }
    }

    #[test]
    fn headers_of_a_peer_that_is_not_trusted_are_ignored() {
        let trusted = networks(&["10.0.0.0/8"]);
        for extractor in [
            ClientIp::x_forwarded_for(trusted.clone()),
            ClientIp::forwarded(trusted.clone()),
            ClientIp::header(HeaderName::from_static("x-real-ip"), trusted.clone()),
            ClientIp::cloudfront(trusted),
            ClientIp::x_forwarded_for(networks(&[])),
            ClientIp::x_forwarded_for_hops(0),
        ] {
            let headers = [
                ("x-forwarded-for", "9.9.9.1"),
                ("forwarded", "for=9.9.9.2"),
                ("x-real-ip", "9.9.9.3"),
                ("cloudfront-viewer-address", "9.9.9.4:80"),
            ];
            assert_eq!(client(&extractor, "198.51.100.5", &headers), "198.51.100.5");
        }
    }

    #[test]
    fn behind_two_proxies_the_inner_one_is_not_everybodys_key() {
        let extractor = ClientIp::x_forwarded_for(networks(&["172.16.0.0/12"]));
        for (value, expected) in [
            ("198.51.100.4, 172.17.0.1", "198.51.100.4"),
            ("198.51.100.5, 172.17.0.1", "198.51.100.5"),
            ("6.6.6.6, 198.51.100.4, 172.17.0.1", "198.51.100.4"),
            ("garbage, 172.17.0.1", "172.17.0.1"),
            ("6.6.6.6, garbage, 172.17.0.1", "172.17.0.1"),
            ("6.6.6.6, , 172.17.0.1", "172.17.0.1"),
            ("6.6.6.6, unknown", "172.18.0.2"),
            ("6.6.6.6, _hidden", "172.18.0.2"),
        ] {
            assert_eq!(client(&extractor, "172.18.0.2", &xff(value)), expected, "{value}");
        }
    }

    #[test]
    fn if_all_are_trusted_the_leftmost_is_the_client() {
        let extractor = ClientIp::x_forwarded_for(networks(&["10.0.0.0/8"]));
        assert_eq!(client(&extractor, "10.0.0.1", &xff("10.0.0.3, 10.0.0.2")), "10.0.0.3");
        assert_eq!(client(&extractor, "10.0.0.1", &[]), "10.0.0.1");
    }

    #[test]
    fn all_lines_of_the_header_are_one_list() {
        let extractor = ClientIp::x_forwarded_for(networks(&["10.0.0.0/8"]));
        let lines = [
            ("x-forwarded-for", "6.6.6.6"),
            ("x-forwarded-for", "203.0.113.9"),
            ("x-forwarded-for", "10.0.0.3, 10.0.0.2"),
        ];
        assert_eq!(client(&extractor, "10.0.0.1", &lines), "203.0.113.9");
    }

    #[test]
    fn one_header_is_read_and_no_other() {
        let trusted = networks(&["10.0.0.0/8"]);
        let headers = [
            ("x-forwarded-for", "203.0.113.1"),
            ("forwarded", "for=203.0.113.2"),
            ("x-real-ip", "203.0.113.3"),
            ("cloudfront-viewer-address", "203.0.113.4:80"),
        ];
        let header = |name| ClientIp::header(HeaderName::from_static(name), trusted.clone());
        for (extractor, expected) in [
            (ClientIp::x_forwarded_for(trusted.clone()), "203.0.113.1"),
            (ClientIp::forwarded(trusted.clone()), "203.0.113.2"),
            (header("x-real-ip"), "203.0.113.3"),
            (ClientIp::cloudfront(trusted.clone()), "203.0.113.4"),
            (header("cf-connecting-ip"), "10.0.0.1"),
        ] {
            assert_eq!(client(&extractor, "10.0.0.1", &headers), expected);
        }
    }

    #[test]
    fn mapped_addresses_are_canonical_before_they_are_trusted_or_counted() {
        let extractor = ClientIp::x_forwarded_for(networks(&["10.0.0.0/8"]));
        let value = "::ffff:203.0.113.9, [::ffff:10.0.0.2]:80";
        assert_eq!(client(&extractor, "::ffff:10.0.0.1", &xff(value)), "203.0.113.9");
    }

    #[test]
    fn the_client_is_so_many_hops_away() {
        for (proxies, value, expected) in [
            (0, "203.0.113.9", "10.0.0.1"),
            (1, "6.6.6.6, 203.0.113.9", "203.0.113.9"),
            (2, "6.6.6.6, 203.0.113.9, 10.0.0.2", "203.0.113.9"),
            (2, "203.0.113.9", "10.0.0.1"),
            (1, "", "10.0.0.1"),
            (2, "6.6.6.6, garbage, 10.0.0.2", "10.0.0.2"),
            (usize::MAX, "203.0.113.9, 10.0.0.2", "10.0.0.1"),
        ] {
            let extractor = ClientIp::x_forwarded_for_hops(proxies);
            assert_eq!(client(&extractor, "10.0.0.1", &xff(value)), expected, "{proxies} {value}");
        }
        let extractor = ClientIp::forwarded_hops(1);
        let headers = [("forwarded", "for=6.6.6.6, for=\"[2001:db8::9]:80\"")];
        assert_eq!(client(&extractor, "10.0.0.1", &headers), "2001:db8::9");
        assert_eq!(client(&ClientIp::x_forwarded_for_hops(1), "10.0.0.1", &[]), "10.0.0.1");
    }

    #[test]
    fn clients_are_counted_by_the_same_prefixes_as_peers() {
        let extractor = ClientIp::x_forwarded_for_hops(1);
        let key = |extractor: &ClientIp, value| extractor.extract(&parts("10.0.0.1", &xff(value)));
        let (a, b) = ("2001:db8:1:2::1", "2001:db8:1:2::2");
        assert_eq!(key(&extractor, a), key(&extractor, b));
        let whole = extractor.clone().ipv6_prefix(128);
        assert_ne!(key(&whole, a), key(&whole, b));
        let v4 = extractor.clone().ipv4_prefix(24);
        assert_eq!(key(&v4, "192.0.2.1"), key(&v4, "192.0.2.2"));
        assert_ne!(key(&extractor, "192.0.2.1"), key(&extractor, "192.0.2.2"));
    }

    #[test]
    fn a_long_list_is_not_walked_to_its_end() {
        let extractor = ClientIp::x_forwarded_for(networks(&["10.0.0.0/8"]));
        let mut list = vec![String::from("203.0.113.9")];
        list.extend((0..10_000).map(|at| format!("10.0.{}.{}", at / 100, at % 100)));
        let parts = parts("10.0.0.1", &xff(&list.join(", ")));
        let allocations = allocation_counter::measure(|| {
            let address = extractor.address(&parts).unwrap();
            assert_eq!(address, Ipv4Addr::new(10, 0, 99, 100 - 32));
        });
        assert_eq!(allocations.count_total, 0);
    }

    /// The walk as a sentence, over the list as a whole.
    fn model(trusted: &Networks, peer: IpAddr, list: &[Option<IpAddr>]) -> IpAddr {
        let told = list.iter().rev().map_while(|hop| *hop);
        let path: Vec<_> = [peer].into_iter().chain(told).collect();
        let first_untrusted = path.iter().find(|hop| !trusted.contains(**hop));
        *first_untrusted.unwrap_or(&path[path.len() - 1])
    }

    proptest! {
        #[test]
        fn the_walk_does_what_its_rule_says(
            peer in 0_u8..8,
            list in proptest::collection::vec(proptest::option::weighted(0.9, 0_u8..8), 0..8),
        ) {
            let trusted = networks(&["10.0.0.0/30", "2001:db8::/126"]);
            let address = |host: u8| match host % 2 {
                0 => IpAddr::from([10, 0, 0, host]),
                _ => format!("2001:db8::{host}").parse().unwrap(),
            };
            let list: Vec<_> = list.iter().map(|host| host.map(address)).collect();
            let print = |hop: &Option<IpAddr>| hop.map_or("unknown".into(), |ip| ip.to_string());
            let value = list.iter().map(print).collect::<Vec<_>>().join(", ");
            let headers = xff(&value);
            let headers = if list.is_empty() { &[] } else { &headers[..] };
            let expected = model(&trusted, address(peer), &list).to_string();
            let extractor = ClientIp::x_forwarded_for(trusted);
            prop_assert_eq!(client(&extractor, &address(peer).to_string(), headers), expected);
        }
    }

    // === networks ===

    #[test]
    fn networks_hold_what_they_say() {
        for (list, inside, outside) in [
            (&["10.0.0.0/8"][..], &["10.0.0.0", "10.255.255.255"][..], &["11.0.0.0"][..]),
            (&["10.1.2.3/8"], &["10.9.9.9"], &["11.0.0.0"]),
            (&["192.0.2.1", " ::1 "], &["192.0.2.1", "::1"], &["192.0.2.0", "192.0.2.2", "::2"]),
            (&["0.0.0.0/0"], &["0.0.0.0", "255.255.255.255"], &["::1"]),
            (&["::/0"], &["::", "ffff::"], &["192.0.2.1", "::ffff:192.0.2.1"]),
            (&["::ffff:10.0.0.0/104"], &["10.1.2.3", "::ffff:10.1.2.3"], &["11.0.0.0"]),
            (&["::ffff:10.0.0.1"], &["10.0.0.1"], &["10.0.0.2"]),
            (&["10.0.0.0/9", "10.128.0.0/9"], &["10.0.0.1", "10.200.0.1"], &["9.255.255.255"]),
            (&["255.255.255.255"], &["255.255.255.255"], &["255.255.255.254"]),
            (&[], &[], &["192.0.2.1", "::"]),
        ] {
            let networks = networks(list);
            for address in inside {
                assert!(networks.contains(address.parse().unwrap()), "{list:?} {address}");
            }
            for address in outside {
                assert!(!networks.contains(address.parse().unwrap()), "{list:?} {address}");
            }
        }
    }

    #[test]
    fn a_text_that_is_no_network_is_named() {
        for text in ["10.0.0.0/33", "::/129", "10.0.0", "10.0.0.0/", "/8", "localhost", "", "a\nb"]
        {
            let error = Networks::new(["::1", text]).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{text:?} is not a network")), "{error}");
        }
    }

    #[test]
    fn private_networks_are_those_not_routed_on_the_internet() {
        let private = Networks::private();
        for address in ["127.0.0.1", "10.0.0.1", "172.31.0.1", "192.168.1.1", "::1", "fd00::1"] {
            assert!(private.contains(address.parse().unwrap()), "{address}");
        }
        for address in ["172.32.0.1", "192.0.2.1", "8.8.8.8", "2001:db8::1", "::"] {
            assert!(!private.contains(address.parse().unwrap()), "{address}");
        }
    }

    proptest! {
        #[test]
        fn merged_networks_hold_the_same_addresses(
            list in proptest::collection::vec((any::<bool>(), any::<u8>(), 0_u8..=128), 0..8),
            address in any::<u8>(),
        ) {
            let place = |v6, byte| match v6 {
                true => IpAddr::from([byte; 16]),
                false => IpAddr::from([byte; 4]),
            };
            let list: Vec<_> = list
                .into_iter()
                .map(|(v6, byte, bits)| (place(v6, byte), if v6 { bits } else { bits % 33 }))
                .collect();
            let texts: Vec<_> = list.iter().map(|(ip, bits)| format!("{ip}/{bits}")).collect();
            let merged = Networks::new(&texts).unwrap();
            for address in [place(true, address), place(false, address)] {
                let one_by_one = list
                    .iter()
                    .any(|(ip, bits)| IpNet::new(*ip, *bits).unwrap().contains(&address));
                prop_assert_eq!(merged.contains(address), one_by_one);
            }
        }
    }

    // === names ===

    #[test]
    fn a_name_tells_all_that_the_key_depends_on() {
        let trusted = || networks(&["10.0.0.0/8"]);
        let header = |name| ClientIp::header(HeaderName::from_static(name), trusted());
        let peers = [PeerIp::new(), PeerIp::new().ipv6_prefix(48), PeerIp::new().ipv4_prefix(24)];
        let clients = [
            ClientIp::x_forwarded_for(trusted()),
            ClientIp::x_forwarded_for(trusted()).ipv6_prefix(48),
            ClientIp::x_forwarded_for(trusted()).ipv4_prefix(24),
            ClientIp::x_forwarded_for(networks(&["10.0.0.0/9"])),
            ClientIp::x_forwarded_for_hops(1),
            ClientIp::x_forwarded_for_hops(2),
            ClientIp::forwarded(trusted()),
            ClientIp::forwarded_hops(1),
            ClientIp::cloudfront(trusted()),
            header("x-forwarded-for"),
            header("x-real-ip"),
        ];
        let names = peers.iter().map(KeyExtractor::name);
        let names: HashSet<_> = names.chain(clients.iter().map(KeyExtractor::name)).collect();
        assert_eq!(names.len(), peers.len() + clients.len());
        assert_eq!(
            KeyExtractor::name(&ClientIp::forwarded(networks(&["::1", "10.0.0.1/8"]))),
            KeyExtractor::name(&ClientIp::forwarded(networks(&["10.0.0.0/8", "::1", "::1/128"]))),
        );
    }
}
