//! What is true of one server only, and of no cluster: databases, sockets, replicas, and passwords from the
//! beginning.

mod support;

use support::{
    fleet::{ask, users},
    secs,
    server::{Flavour, Server},
};
use tollgate::{
    Policy, Quota,
    redis::{ConfigError, RedisStore, Warning},
};

#[tokio::test]
async fn a_replica_is_warned_of() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        server.command(&["REPLICAOF", "127.0.0.1", "1"]);
        let store = RedisStore::builder(server.url()).deadline(secs(20)).build().unwrap();
        let warnings = store.check().await.unwrap();
        assert_eq!(warnings, [Warning::Replica], "{flavour:?}");
        assert!(warnings[0].to_string().contains("primary"));
    }
}

#[tokio::test]
async fn a_server_is_found_by_its_socket_its_database_and_its_user() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        server.command(&["ACL", "SETUSER", "app", "on", ">p%w", "~tg:*", "+@all"]);
        let (port, path) = (server.port(), server.unix_path().display().to_string());
        let urls = [
            format!("redis://127.0.0.1:{port}"),
            format!("redis://localhost:{port}/0"),
            format!("redis://127.0.0.1:{port}/3"),
            format!("redis://app:p%25w@127.0.0.1:{port}/4"),
            format!("redis://127.0.0.1:{port}/?protocol=resp2"),
            format!("unix://{path}"),
            format!("unix://{path}?db=5"),
            format!("redis+unix://{path}?user=app&pass=p%25w&db=6"),
        ];
        for url in urls {
            let builder = RedisStore::builder(&url[..]).deadline(secs(20));
            let store = builder.build().unwrap_or_else(|error| panic!("{url}: {error}"));
            let limiter = users(&store, [Policy::token_bucket("p", Quota::per_hour(2))]);
            limiter.reset_async("u").await.unwrap();
            assert_eq!(ask(&limiter, "u", 3).await, [true, true, false], "{url} {flavour:?}");
            assert_eq!(store.health().failed, 0, "{url}");
            assert_eq!(store.check().await.unwrap(), [], "{url}");
        }
        let keyspace = server.command(&["INFO", "keyspace"]);
        for database in ["db0", "db3", "db4", "db5", "db6"] {
            assert!(keyspace.text().contains(database), "{database}: {}", keyspace.text());
        }
    }
}

#[tokio::test]
async fn promise_8_keys_dont_leak_nor_do_passwords() {
    let server = Server::with(Flavour::Redis7, &["--requirepass", "another"]);
    let url = format!("redis://:SECRET@127.0.0.1:{}", server.port());
    let builder = RedisStore::builder(&url[..]).hash_secret("SECRET");
    assert!(!format!("{builder:?}").contains("SECRET"));
    let store = builder.build().unwrap();
    let limiter = users(&store, [Policy::token_bucket("p", Quota::per_hour(1))]);
    let _ = limiter.check_async("u").await;
    let error = store.check().await.unwrap_err();
    let shown = format!("{store:?} {limiter:?} {error:?} {error}");
    assert!(!shown.contains("SECRET"), "{shown}");
    let bad = RedisStore::builder("http://:SECRET@host").build().unwrap_err();
    assert!(matches!(bad, ConfigError::Address { .. }));
    assert!(!format!("{bad} {bad:?}").contains("SECRET"), "{bad}");
}
