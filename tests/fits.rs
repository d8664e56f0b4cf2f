//! The layer fits where a team would put it. Most of this is proved by compiling.

use axum::{
    Router,
    body::Body,
    http::{Request, Response, StatusCode},
    response::IntoResponse,
    routing::get,
};
use http_body_util::Empty;
use hyper_util::service::TowerToHyperService;
use std::{convert::Infallible, time::Duration};
use tollgate::{
    CallError, Calls, Limiter, Policy, Quota, RateLimit, RateLimitLayer, ResponseBody,
    key::{Global, Key},
};
use tonic::service::{LayerExt, interceptor::InterceptedService};
use tower::{
    Layer, Service, ServiceBuilder, ServiceExt,
    util::{BoxCloneSyncService, option_layer},
};

fn layer() -> RateLimitLayer {
    RateLimitLayer::builder()
        .key(Global)
        .policy(Policy::token_bucket("all", Quota::per_hour(1)))
        .build()
        .unwrap()
}

async fn statuses<S, B>(service: S) -> [StatusCode; 2]
where
    S: Service<Request<Body>, Response = Response<B>> + Clone,
    S::Error: std::fmt::Debug,
{
    let call = || async {
        let request = Request::get("/").body(Body::empty()).unwrap();
        service.clone().oneshot(request).await.unwrap().status()
    };
    [call().await, call().await]
}

const LIMITED: [StatusCode; 2] = [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS];

#[tokio::test]
async fn it_fits_router_layer() {
    assert_eq!(statuses(Router::new().route("/", get(|| async {})).layer(layer())).await, LIMITED);
}

#[tokio::test]
async fn it_fits_router_route_layer() {
    let app = Router::new().route("/", get(|| async {})).route_layer(layer());
    assert_eq!(statuses(app).await, LIMITED);
}

#[tokio::test]
async fn it_fits_method_router_layer() {
    let app: Router = Router::new().route("/", get(|| async {}).layer(layer()));
    assert_eq!(statuses(app).await, LIMITED);
    let app: Router = Router::new().route("/", get(|| async {}).route_layer(layer()));
    assert_eq!(statuses(app).await, LIMITED);
}

#[tokio::test]
async fn it_fits_around_a_whole_router() {
    assert_eq!(statuses(layer().layer(Router::new().route("/", get(|| async {})))).await, LIMITED);
}

#[tokio::test]
async fn it_fits_service_builder() {
    let app = Router::new().route("/", get(|| async {})).layer(
        ServiceBuilder::new()
            .map_err(|_: tower::BoxError| -> Infallible { unreachable!("nothing takes that long") })
            .layer(layer())
            .layer(tower::timeout::TimeoutLayer::new(Duration::from_secs(9))),
    );
    assert_eq!(statuses(app).await, LIMITED);
}

#[tokio::test]
async fn it_fits_option_layer() {
    // Both ways through an optional layer have to end in the same type of body.
    let same_body =
        |layer| ServiceBuilder::new().map_response(IntoResponse::into_response).layer(layer);
    for (layer, expected) in [(Some(layer()), LIMITED), (None, [StatusCode::OK; 2])] {
        let app =
            Router::new().route("/", get(|| async {})).layer(option_layer(layer.map(same_body)));
        assert_eq!(statuses(app).await, expected);
    }
}

#[tokio::test]
async fn layers_stack_on_each_other() {
    let app = Router::new().route("/", get(|| async {})).layer(layer()).layer(layer());
    assert_eq!(statuses(app).await, LIMITED);
}

#[tokio::test]
async fn it_fits_hyper() {
    let service = layer().layer(tower::service_fn(|_: Request<Empty<bytes::Bytes>>| async {
        Ok::<_, Infallible>(Response::new(Empty::<bytes::Bytes>::new()))
    }));
    let service = TowerToHyperService::new(service);
    let call = |service: &TowerToHyperService<_>| {
        hyper::service::Service::call(service, Request::new(Empty::new()))
    };
    assert_eq!(call(&service).await.unwrap().status(), StatusCode::OK);
    assert_eq!(call(&service).await.unwrap().status(), StatusCode::TOO_MANY_REQUESTS);
}

#[test]
fn it_fits_tonic_servers_and_single_services() {
    let (_, health) = tonic_health::server::health_reporter();
    let server = || tonic::transport::Server::builder().layer(layer());
    let anywhere = "127.0.0.1:0".parse().unwrap();
    // Serving is where the bounds are checked; nothing is served here.
    drop(server().add_service(layer().named_layer(health.clone())).serve(anywhere));
    // A limited service has the name of the one inside.
    drop(server().add_service(RateLimit::new(health.clone(), &layer())).serve(anywhere));
    let interceptor = layer().interceptor().unwrap();
    drop(server().add_service(InterceptedService::new(health, interceptor)).serve(anywhere));
}

#[tokio::test]
async fn it_fits_any_other_service() {
    struct Job(&'static str);

    let limiter = Limiter::<Job>::builder()
        .key(|job: &Job| Key::from(job.0))
        .policy(Policy::token_bucket("jobs", Quota::per_hour(1)))
        .build()
        .unwrap();
    let worker = tower::service_fn(|job: Job| async move {
        if job.0 == "bad" { Err("failed") } else { Ok(job.0.len()) }
    });
    let service: RateLimit<_, Calls<Job>> = RateLimitLayer::calls(limiter).layer(worker);

    assert_eq!(service.clone().oneshot(Job("good")).await, Ok(4));
    let error = service.clone().oneshot(Job("good")).await.unwrap_err();
    let CallError::Rejected(rejection) = error else { panic!("{error:?}") };
    assert_eq!(rejection.policies().collect::<Vec<_>>(), ["jobs"]);
    assert_eq!(service.clone().oneshot(Job("bad")).await, Err(CallError::Inner("failed")));
}

#[tokio::test]
async fn a_limited_service_can_be_boxed() {
    let service = layer().layer(Router::new().route("/", get(|| async {})));
    let boxed: BoxCloneSyncService<Request<Body>, Response<ResponseBody<Body>>, Infallible> =
        BoxCloneSyncService::new(service);
    assert_eq!(statuses(boxed).await, LIMITED);
}

#[test]
fn public_types_can_go_everywhere() {
    fn goes_everywhere<T: Send + Sync + Clone + std::fmt::Debug + 'static>() {}
    fn is_an_error<T: std::error::Error + Send + Sync + 'static>() {}

    goes_everywhere::<RateLimitLayer>();
    goes_everywhere::<RateLimitLayer<Calls<String>>>();
    goes_everywhere::<RateLimit<Router>>();
    goes_everywhere::<Limiter<str>>();
    goes_everywhere::<tollgate::Clock>();
    goes_everywhere::<tollgate::Decision>();
    goes_everywhere::<tollgate::LocalStore>();
    goes_everywhere::<tollgate::RateLimitInterceptor>();
    goes_everywhere::<Quota>();
    goes_everywhere::<Key>();
    is_an_error::<tollgate::Rejection>();
    is_an_error::<tollgate::BuildError>();
    is_an_error::<tollgate::QuotaError>();
    is_an_error::<tollgate::key::KeyError>();
    is_an_error::<CallError<std::io::Error>>();
}
