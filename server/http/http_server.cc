#include "server/http/http_server.h"

#include <httplib.h>
#include <sys/socket.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/http/access.h"
#include "server/http/console_assets.h"
#include "server/http/gzip.h"
#include "server/http/http_listener.h"
#include "server/http/json_gateway.h"
#include "server/util/log.h"

namespace bellwether::server {
namespace {

constexpr char kApi[] = "/api/v1/";
constexpr char kJson[] = "application/json; charset=utf-8";
constexpr char kText[] = "text/plain; charset=utf-8";
constexpr size_t kGzipBytesMin = 1024;  // Below, the header costs more than it saves.
constexpr size_t kAssetBytesMax = 4 << 20;

httplib::Headers SecurityHeaders() {
  return {
      {"Content-Security-Policy",
       "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
      {"X-Content-Type-Options", "nosniff"},
      {"X-Frame-Options", "DENY"},
      {"Referrer-Policy", "no-referrer"},
      {"Cross-Origin-Opener-Policy", "same-origin"},
      {"Cross-Origin-Resource-Policy", "same-origin"},
  };
}

bool AcceptsGzip(const httplib::Request& request) {
  return absl::StrContains(request.get_header_value("Accept-Encoding"), "gzip");
}

// A provider of known length: cpp-httplib leaves such a body as it is.
void SetBody(httplib::Response* response, std::string body, const std::string& type) {
  auto shared = std::make_shared<std::string>(std::move(body));
  if (shared->empty()) {
    response->set_content("", type);
    return;
  }
  response->set_content_provider(shared->size(), type, [shared](size_t offset, size_t length, httplib::DataSink& sink) {
    return sink.write(shared->data() + offset, length);
  });
}

void Reply(const httplib::Request& request, httplib::Response* response, int status, std::string body,
           const std::string& type) {
  response->status = status;
  response->set_header("Cache-Control", "no-store");
  response->set_header("Vary", "Accept-Encoding");
  if (body.size() >= kGzipBytesMin && AcceptsGzip(request)) {
    if (std::string zipped = Gzip(body); !zipped.empty()) {
      response->set_header("Content-Encoding", "gzip");
      body = std::move(zipped);
    }
  }
  SetBody(response, std::move(body), type);
}

void ReplyError(const httplib::Request& request, httplib::Response* response, const absl::Status& status) {
  Reply(request, response, HttpStatus(status.code()), ErrorJson(status), kJson);
}

// A label of few values: what people type must not become series.
std::string PathLabel(const httplib::Request& request, int status) {
  const std::string& path = request.path;
  for (const char* const known : {"/metrics", "/-/healthy", "/-/ready", "/-/reload", "/api/v1/events"}) {
    if (path == known) return path;
  }
  if (absl::StartsWith(path, kApi)) return status == 501 || status == 404 ? "/api/v1/" : path;
  return FindConsoleAsset(path.empty() ? path : path.substr(1)) != nullptr ? "/" : "other";
}

// The certificate of this moment, for one handshake; a rotated one is for the next.
int ChooseCertificate(SSL* ssl, void* watch) {
  const std::shared_ptr<const TlsMaterial> material = static_cast<const TlsWatch*>(watch)->material();
  const std::unique_ptr<STACK_OF(X509), void (*)(STACK_OF(X509)*)> rest(sk_X509_new_null(),
                                                                        [](STACK_OF(X509) * s) { sk_X509_free(s); });
  for (size_t i = 1; i < material->chain.size(); ++i) sk_X509_push(rest.get(), material->chain[i].get());
  if (SSL_use_cert_and_key(ssl, material->chain[0].get(), material->key.get(), rest.get(), 1) != 1) return 0;
  if (material->client_store == nullptr) return 1;
  SSL_set1_verify_cert_store(ssl, material->client_store.get());
  for (const X509Ptr& authority : material->client_ca) SSL_add_client_CA(ssl, authority.get());
  SSL_set_verify(ssl, SSL_VERIFY_PEER, nullptr);  // One that is shown must be good; none is none.
  return 1;
}

bool SetUpTls(SSL_CTX* context, TlsWatch* watch) {
  SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
  SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION | SSL_OP_NO_TICKET);
  // A resumed session would keep a certificate that has been taken back.
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(context, 0);
  SSL_CTX_set_cert_cb(context, ChooseCertificate, watch);
  return SSL_CTX_set_cipher_list(context, "ECDHE+AESGCM:ECDHE+CHACHA20") == 1;
}

std::unique_ptr<httplib::Server> MakeHttpServer(TlsWatch* tls) {
  if (tls == nullptr) return std::make_unique<httplib::Server>();
  return std::make_unique<httplib::SSLServer>([tls](SSL_CTX& context) { return SetUpTls(&context, tls); });
}

// cpp-httplib serves only what it has accepted itself: what it does with a
// connection is private, and so is the descriptor that its loops look at to see
// the end.  Access is not checked for what an explicit instantiation names.
using ServeSocket = bool (httplib::Server::*)(socket_t);
using ListenerOf = std::atomic<socket_t> httplib::Server::*;
ServeSocket PrivateServe();
ListenerOf PrivateListener();
template <ServeSocket serve, ListenerOf listener>
struct Private {
  friend ServeSocket PrivateServe() { return serve; }
  friend ListenerOf PrivateListener() { return listener; }
};
template struct Private<&httplib::Server::process_and_close_socket, &httplib::Server::svr_sock_>;

class HttpServerImpl final : public HttpServer {
 public:
  HttpServerImpl(const HttpOptions& options, HttpSources sources)
      : options_(options),
        sources_(std::move(sources)),
        hub_(options.events, sources_.runs, sources_.alerts, sources_.counters, sources_.transition_json,
             sources_.others),
        server_(MakeHttpServer(sources_.tls)),
        listener_(
            {.per_address_max = options.connections_per_address_max,
             .threads_max = static_cast<size_t>(options.workers_max + options.events.streams_max),
             .queue_max = static_cast<size_t>(options.queue_max),
             .read_seconds_max = options.read_seconds_max,
             .write_seconds_max = options.write_seconds_max},
            [this](int fd) { (server_.get()->*PrivateServe())(fd); }, sources_.counters) {}
  ~HttpServerImpl() override { Stop(); }

  absl::Status Start();
  int port() const override { return port_; }
  void Stop() override;

 private:
  using Request = httplib::Request;
  using Response = httplib::Response;

  // True if the request is answered: refused, or led elsewhere.
  bool Refuse(const Request& request, Response& response) const;
  bool EnterByAddress(const Request& request, Response& response) const;
  Credentials CredentialsOf(const Request& request) const;
  // Who asks; null where nobody is asked.  Answers the request if that is not known.
  std::optional<GrantPtr> Identify(const Request& request, Response& response) const;
  // For the role and every run; answers the request if not.
  bool MayAll(const Request& request, Response& response, Role role) const;
  void Get(const Request& request, Response& response);
  void Post(const Request& request, Response& response);
  void Reload(const Request& request, Response& response);
  void Call(const Request& request, Response& response, const std::string& body);
  void Events(const Request& request, Response& response);
  void Asset(const Request& request, Response& response) const;
  bool secure() const { return sources_.tls != nullptr; }
  std::string CookieName() const { return absl::StrCat("bellwether_", port_); }

  const HttpOptions options_;
  const HttpSources sources_;
  EventHub hub_;
  const std::unique_ptr<httplib::Server> server_;
  HttpListener listener_;
  int port_ = 0;
};

absl::Status HttpServerImpl::Start() {
  // Not cpp-httplib's own, which lets a second server bind the same port.
  server_->set_socket_options([](socket_t socket) {
    const int yes = 1;
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  });
  server_->set_tcp_nodelay(true);
  server_->set_payload_max_length(options_.body_bytes_max);
  server_->set_read_timeout(options_.read_seconds_max);
  server_->set_write_timeout(options_.write_seconds_max);
  server_->set_keep_alive_timeout(options_.keepalive_seconds);
  server_->set_keep_alive_max_count(static_cast<size_t>(options_.keepalive_requests_max));
  server_->set_default_headers(SecurityHeaders());
  server_->set_pre_routing_handler([this](const Request& request, Response& response) {
    return Refuse(request, response) ? httplib::Server::HandlerResponse::Handled
                                     : httplib::Server::HandlerResponse::Unhandled;
  });
  server_->Get(".*", [this](const Request& request, Response& response) { Get(request, response); });
  server_->Post(".*", [this](const Request& request, Response& response) { Post(request, response); });
  server_->set_error_handler([](const Request&, Response& response) {
    if (response.body.empty() && !response.content_provider_) {
      response.set_content(absl::StrCat("error ", response.status, "\n"), kText);
    }
  });
  server_->set_exception_handler([](const Request& request, Response& response, std::exception_ptr) {
    LogError("http: an exception on {}", request.path);
    response.status = 500;
  });
  server_->set_logger([this](const Request& request, const Response& response) {
    sources_.counters
        ->counter("bellwether_http_requests_total",
                  {{"path", PathLabel(request, response.status)}, {"code", absl::StrCat(response.status)}})
        ->Add();
  });

  if (options_.port == 0) {
    port_ = server_->bind_to_any_port(options_.host);
  } else {
    port_ = server_->bind_to_port(options_.host, options_.port) ? options_.port : -1;
  }
  if (port_ <= 0) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", options_.host, ":", options_.port,
                                               " for HTTP: the address is taken or not of this machine"));
  }
  const int listener = server_.get()->*PrivateListener();
  listen(listener, SOMAXCONN);  // cpp-httplib lets five wait.
  listener_.Start(listener);
  return absl::OkStatus();
}

void HttpServerImpl::Stop() {
  hub_.Stop();
  server_.get()->*PrivateListener() = INVALID_SOCKET;  // Ends what is kept alive.
  listener_.Stop();
}

bool HttpServerImpl::Refuse(const Request& request, Response& response) const {
  if (!HostIsAllowed(request.get_header_value("Host"), options_.hosts)) {
    Reply(request, &response, 421, "This server does not answer to that name; see web.hosts in its configuration.\n",
          kText);
    return true;
  }
  if (sources_.access == nullptr || request.path == "/-/healthy") return false;
  return EnterByAddress(request, response) || !Identify(request, response).has_value();
}

bool HttpServerImpl::EnterByAddress(const Request& request, Response& response) const {
  if (request.method != "GET" || request.path != "/" || !request.has_param("token") || !sources_.access->has_tokens()) {
    return false;
  }
  Credentials credentials = CredentialsOf(request);
  credentials.token = request.get_param_value("token");
  if (!sources_.access->Identify(credentials, "page").ok()) return false;
  // Of our tokens' letters only: nothing else may stand in a header.
  response.set_header("Set-Cookie", absl::StrCat(CookieName(), "=", *credentials.token,
                                                 "; Path=/; HttpOnly; SameSite=Strict", secure() ? "; Secure" : ""));
  response.set_header("Cache-Control", "no-store");
  // Relative, for path prefixes; the token leaves the address bar.
  response.set_redirect("./", 303);
  return true;
}

Credentials HttpServerImpl::CredentialsOf(const Request& request) const {
  Credentials credentials{.face = Credentials::Face::kHttp,
                          .peer = absl::StrCat(request.remote_addr, ":", request.remote_port)};
  if (request.ssl != nullptr) {
    X509* const certificate = SSL_get0_peer_certificate(request.ssl);
    if (certificate != nullptr && SSL_get_verify_result(request.ssl) == X509_V_OK) {
      credentials.certificate = UrisOf(certificate);
      credentials.certificate_pem = PemOf(certificate, SSL_get_peer_cert_chain(request.ssl));
    }
  }
  const std::string authorization = request.get_header_value("Authorization");
  const std::string cookies = request.get_header_value("Cookie");
  const std::string_view cookie = CookieValue(cookies, CookieName());
  absl::string_view bearer = authorization;
  if (absl::ConsumePrefix(&bearer, "Bearer ")) {
    credentials.token = std::string(bearer);
  } else if (!cookie.empty()) {
    credentials.token = std::string(cookie);
  }
  return credentials;
}

std::optional<GrantPtr> HttpServerImpl::Identify(const Request& request, Response& response) const {
  if (sources_.access == nullptr) return GrantPtr();
  auto grant = sources_.access->Identify(CredentialsOf(request), request.path);
  if (grant.ok()) return *std::move(grant);
  response.set_header("WWW-Authenticate", "Bearer");
  const std::string why = sources_.access->open()
                              ? "This server wants a token: open the address that it printed at start."
                              : std::string(grant.status().message());
  Reply(request, &response, 401, why + "\n", kText);
  return std::nullopt;
}

bool HttpServerImpl::MayAll(const Request& request, Response& response, Role role) const {
  const std::optional<GrantPtr> grant = Identify(request, response);
  if (!grant.has_value()) return false;
  if (*grant == nullptr) return true;
  const absl::Status allowed = (*grant)->CheckAll(role);
  (*grant)->Note(request.path, "", allowed, role == Role::kAdmin);
  if (!allowed.ok()) ReplyError(request, &response, allowed);
  return allowed.ok();
}

void HttpServerImpl::Get(const Request& request, Response& response) {
  const std::string& path = request.path;
  if (path == "/metrics") {
    if (!MayAll(request, response, Role::kRead)) return;
    Reply(request, &response, 200, sources_.metrics(), "text/plain; version=0.0.4; charset=utf-8");
  } else if (path == "/-/healthy") {
    Reply(request, &response, 200, "healthy\n", kText);
  } else if (path == "/-/ready") {
    const absl::Status ready = sources_.ready();
    Reply(request, &response, ready.ok() ? 200 : 503, ready.ok() ? "ready\n" : absl::StrCat(ready.message(), "\n"),
          kText);
  } else if (path == "/-/reload") {
    response.set_header("Allow", "POST");
    Reply(request, &response, 405, "this changes something: use POST\n", kText);
  } else if (path == "/api/v1/events") {
    Events(request, response);
  } else if (absl::StartsWith(path, kApi)) {
    if (!IsReadMethod(std::string_view(path).substr(sizeof(kApi) - 1))) {
      response.set_header("Allow", "POST");
      Reply(request, &response, 405, ErrorJson(absl::InvalidArgumentError("this call changes something: use POST")),
            kJson);
      return;
    }
    const absl::StatusOr<std::string> body = ParametersToJson(request.params);
    if (!body.ok()) return ReplyError(request, &response, body.status());
    Call(request, response, *body);
  } else {
    Asset(request, response);
  }
}

void HttpServerImpl::Post(const Request& request, Response& response) {
  const bool reload = request.path == "/-/reload";
  if (!reload && (!absl::StartsWith(request.path, kApi) || request.path == "/api/v1/events")) {
    Reply(request, &response, 404, "not found\n", kText);
    return;
  }
  const std::string type = request.get_header_value("Content-Type");
  if (!absl::StartsWithIgnoreCase(type, "application/json")) {
    Reply(request, &response, 415, ErrorJson(absl::InvalidArgumentError("Content-Type must be application/json")),
          kJson);
    return;
  }
  if (reload) return Reload(request, response);
  Call(request, response, request.body);
}

void HttpServerImpl::Reload(const Request& request, Response& response) {
  if (sources_.reload == nullptr) {
    Reply(request, &response, 403, "reloading by HTTP is off; see web.enable_reload in the configuration\n", kText);
    return;
  }
  if (!MayAll(request, response, Role::kAdmin)) return;
  if (const absl::Status reloaded = sources_.reload(); !reloaded.ok()) return ReplyError(request, &response, reloaded);
  Reply(request, &response, 200, "reloaded\n", kText);
}

void HttpServerImpl::Call(const Request& request, Response& response, const std::string& body) {
  const std::optional<GrantPtr> grant = Identify(request, response);
  if (!grant.has_value()) return;
  absl::StatusOr<std::string> answer = sources_.call(request.path.substr(sizeof(kApi) - 1), body, *grant);
  if (!answer.ok()) return ReplyError(request, &response, answer.status());
  Reply(request, &response, 200, *std::move(answer), kJson);
}

void HttpServerImpl::Events(const Request& request, Response& response) {
  std::optional<uint64_t> after;
  uint64_t id;
  if (absl::SimpleAtoi(request.get_header_value("Last-Event-ID"), &id)) after = id;
  const std::optional<GrantPtr> grant = Identify(request, response);
  if (!grant.has_value()) return;
  if (*grant != nullptr) {
    if (const absl::Status allowed = (*grant)->Check(Role::kRead); !allowed.ok()) {
      (*grant)->Note("events", "", allowed, false);
      return ReplyError(request, &response, allowed);
    }
  }
  std::shared_ptr<EventStream> stream = hub_.Open(after, *grant);
  if (stream == nullptr) {
    response.set_header("Retry-After", "30");
    Reply(request, &response, 503, "too many event streams are open; poll instead\n", kText);
    return;
  }
  response.set_header("Cache-Control", "no-store");
  response.set_header("X-Accel-Buffering", "no");  // Proxies must not collect.
  response.set_chunked_content_provider("text/event-stream", [stream](size_t, httplib::DataSink& sink) {
    const std::optional<std::string> text = stream->Next();
    if (!text.has_value()) {
      sink.done();
      return true;
    }
    return text->empty() || sink.write(text->data(), text->size());
  });
}

void HttpServerImpl::Asset(const Request& request, Response& response) const {
  const ConsoleAsset* const asset = FindConsoleAsset(std::string_view(request.path).substr(1));
  if (asset == nullptr) {
    Reply(request, &response, 404, request.path == "/" ? "This server was built without its page.\n" : "not found\n",
          kText);
    return;
  }
  response.set_header("ETag", std::string(asset->etag));
  response.set_header("Cache-Control", "no-cache");  // Ask, and mostly get a 304.
  response.set_header("Vary", "Accept-Encoding");
  if (absl::StrContains(request.get_header_value("If-None-Match"),
                        absl::string_view(asset->etag.data(), asset->etag.size()))) {
    response.status = 304;
    return;
  }
  response.status = 200;
  if (AcceptsGzip(request)) {
    response.set_header("Content-Encoding", "gzip");
    SetBody(&response, std::string(asset->gzipped), std::string(asset->content_type));
  } else {
    SetBody(&response, Gunzip(asset->gzipped, kAssetBytesMax), std::string(asset->content_type));
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const HttpOptions& options, HttpSources sources) {
  auto server = std::make_unique<HttpServerImpl>(options, std::move(sources));
  const absl::Status started = server->Start();
  if (!started.ok()) return started;
  return server;
}

}  // namespace bellwether::server
