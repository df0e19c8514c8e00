#include "server/http/http_server.h"

#include <httplib.h>
#include <sys/socket.h>

#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/http/access.h"
#include "server/http/console_assets.h"
#include "server/http/gzip.h"
#include "server/http/http_tls.h"
#include "server/http/json_gateway.h"
#include "server/net/http_connection.h"
#include "server/net/http_listener.h"
#include "server/util/host_port.h"
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
// `kept` is, until it has been written.
void SetBody(httplib::Response* response, std::string body, const std::string& type,
             std::shared_ptr<const void> kept = nullptr) {
  auto shared = std::make_shared<std::string>(std::move(body));
  if (shared->empty()) {
    response->set_content("", type);
    return;
  }
  response->set_content_provider(
      shared->size(), type, [shared, kept = std::move(kept)](size_t offset, size_t length, httplib::DataSink& sink) {
        return sink.write(shared->data() + offset, length);
      });
}

void Reply(const httplib::Request& request, httplib::Response* response, int status, std::string body,
           const std::string& type, std::shared_ptr<const void> kept = nullptr) {
  response->status = status;
  response->set_header("Cache-Control", "no-store");
  response->set_header("Vary", "Accept-Encoding");
  if (body.size() >= kGzipBytesMin && AcceptsGzip(request)) {
    if (std::string zipped = Gzip(body); !zipped.empty()) {
      response->set_header("Content-Encoding", "gzip");
      body = std::move(zipped);
    }
  }
  SetBody(response, std::move(body), type, std::move(kept));
}

void ReplyError(const httplib::Request& request, httplib::Response* response, const absl::Status& status) {
  Reply(request, response, HttpStatus(status.code()), ErrorJson(status), kJson);
}

// Of the request's body; nothing if that is not said in one way only.
std::optional<uint64_t> BodyBytes(const httplib::Request& request) {
  if (request.has_header("Transfer-Encoding")) return std::nullopt;
  const size_t lengths = request.get_header_value_count("Content-Length");
  if (lengths == 0) return 0;
  const std::string text = request.get_header_value("Content-Length");
  uint64_t bytes;
  if (lengths > 1 || text.find_first_not_of("0123456789") != std::string::npos || !absl::SimpleAtoi(text, &bytes)) {
    return std::nullopt;
  }
  return bytes;
}

// cpp-httplib without its sockets: it parses one request of a connection of ours,
// and writes the answer.
class Engine final : public httplib::Server {
 public:
  // Bound to an address, for whoever listens; -1 if that cannot be.
  int listener() const { return svr_sock_; }
  // The connection that this thread serves: handlers are told nothing of it.
  static HttpConnection*& Served() {
    thread_local HttpConnection* served = nullptr;
    return served;
  }
  // False: the connection must end.
  bool Serve(HttpConnection* connection, size_t body_bytes_max) {
    bool closed = false;
    Served() = connection;
    const auto set_up = [&](httplib::Request& request) {
      request.ssl = connection->ssl();
      // Thousands of them fit into a line, and multiply the answer.
      request.ranges.clear();
      request.headers.erase("Range");
      const std::optional<uint64_t> bytes = BodyBytes(request);
      connection->ExpectBody(bytes.value_or(0) <= body_bytes_max ? bytes : std::nullopt);
    };
    const bool last = connection->requests() + 1 >= static_cast<int64_t>(keep_alive_max_count_);
    return process_request(*connection, last, closed, set_up) && !closed && !last;
  }
};

class HttpServerImpl final : public HttpServer {
 public:
  HttpServerImpl(const HttpOptions& options, HttpSources sources)
      : options_(options),
        sources_(std::move(sources)),
        hub_(options.events, sources_.runs, sources_.alerts, sources_.counters, sources_.transition_json,
             sources_.others),
        calls_(options.calls, sources_.counters),
        tls_(sources_.tls != nullptr ? MakePageTls(sources_.tls) : nullptr),
        methods_(sources_.methods.begin(), sources_.methods.end()) {}
  ~HttpServerImpl() override { Stop(); }

  absl::Status Start();
  int port() const override { return port_; }
  void Stop() override;

 private:
  using Request = httplib::Request;
  using Response = httplib::Response;

  std::string PathLabel(const std::string& path) const;
  // True if the request is answered: refused, or led elsewhere.
  bool Refuse(const Request& request, Response& response) const;
  bool RefuseByHead(const Request& request, Response& response) const;
  bool EnterByAddress(const Request& request, Response& response) const;
  Credentials CredentialsOf(const Request& request) const;
  // Who asks; null where nobody is asked.  Answers the request if that is not known.
  std::optional<GrantPtr> Identify(const Request& request, Response& response) const;
  // As Identify(), and for the role and every run; answers the request if not.
  std::optional<GrantPtr> MayAll(const Request& request, Response& response, Role role) const;
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
  CallSlots calls_;
  const SslContextPtr tls_;
  const std::set<std::string, std::less<>> methods_;
  Engine server_;
  std::unique_ptr<HttpListener> listener_;
  int port_ = 0;
};

// A label of few values: what people type must not become series.
std::string HttpServerImpl::PathLabel(const std::string& path) const {
  for (const char* const known : {"/metrics", "/-/healthy", "/-/ready", "/-/reload", "/api/v1/events"}) {
    if (path == known) return path;
  }
  if (absl::StartsWith(path, kApi)) return methods_.count(path.substr(sizeof(kApi) - 1)) > 0 ? path : kApi;
  return FindConsoleAsset(path.empty() ? path : path.substr(1)) != nullptr ? "/" : "other";
}

absl::Status HttpServerImpl::Start() {
  if (secure() && tls_ == nullptr) return absl::InternalError("OpenSSL does not offer what the page's TLS needs");
  // Not cpp-httplib's own, which lets a second server bind the same port.
  server_.set_socket_options([](socket_t socket) {
    const int yes = 1;
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  });
  server_.set_payload_max_length(options_.body_bytes_max);
  // Said in answers only: the listener sees to it.
  server_.set_keep_alive_timeout(options_.keepalive_seconds);
  server_.set_keep_alive_max_count(static_cast<size_t>(options_.keepalive_requests_max));
  server_.set_default_headers(SecurityHeaders());
  server_.set_pre_routing_handler([this](const Request& request, Response& response) {
    return Refuse(request, response) ? httplib::Server::HandlerResponse::Handled
                                     : httplib::Server::HandlerResponse::Unhandled;
  });
  server_.Get(".*", [this](const Request& request, Response& response) { Get(request, response); });
  server_.Post(".*", [this](const Request& request, Response& response) { Post(request, response); });
  server_.set_error_handler([](const Request&, Response& response) {
    if (response.body.empty() && !response.content_provider_) {
      response.set_content(absl::StrCat("error ", response.status, "\n"), kText);
    }
  });
  server_.set_exception_handler([](const Request& request, Response& response, std::exception_ptr) {
    LogError("http: an exception on {}", request.path);
    response.status = 500;
  });
  server_.set_logger([this](const Request& request, const Response& response) {
    sources_.counters
        ->counter("bellwether_http_requests_total",
                  {{"path", PathLabel(request.path)}, {"code", absl::StrCat(response.status)}})
        ->Add();
  });

  const std::string bare = BareHost(options_.host);
  if (options_.port == 0) {
    port_ = server_.bind_to_any_port(bare);
  } else {
    port_ = server_.bind_to_port(bare, options_.port) ? options_.port : -1;
  }
  if (port_ <= 0) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", options_.host, ":", options_.port,
                                               " for HTTP: the address is taken or not of this machine"));
  }
  const int listener = server_.listener();
  listen(listener, SOMAXCONN);  // cpp-httplib lets five wait.
  const size_t served = static_cast<size_t>(options_.workers_max + options_.events.streams_max);
  const size_t queue_max = static_cast<size_t>(options_.queue_max);
  listener_ = std::make_unique<HttpListener>(
      HttpListener::Options{.per_address_max = options_.connections_per_address_max,
                            .connections_max = served + queue_max,
                            .threads_max = served,
                            .queue_max = queue_max,
                            .request_seconds_max = options_.request_seconds_max,
                            .write_seconds_max = options_.write_seconds_max,
                            .idle_seconds_max = options_.keepalive_seconds,
                            .tls = tls_.get()},
      [this](HttpConnection* connection) { return server_.Serve(connection, options_.body_bytes_max); },
      sources_.counters);
  listener_->Start(listener);
  return absl::OkStatus();
}

void HttpServerImpl::Stop() {
  hub_.Stop();
  if (listener_ != nullptr) listener_->Stop();
}

bool HttpServerImpl::Refuse(const Request& request, Response& response) const {
  if (!RefuseByHead(request, response)) return false;
  // What of a body was not read would be taken for the next request.
  if (BodyBytes(request) != 0) response.set_header("Connection", "close");
  return true;
}

bool HttpServerImpl::RefuseByHead(const Request& request, Response& response) const {
  if (!HostIsAllowed(request.get_header_value("Host"), options_.hosts)) {
    Reply(request, &response, 421, "This server does not answer to that name; see web.hosts in its configuration.\n",
          kText);
    return true;
  }
  // cpp-httplib would take bodies of any size by these.
  if (request.has_header("Transfer-Encoding") || request.has_header("Content-Encoding")) {
    const bool chunked = request.has_header("Transfer-Encoding");
    Reply(request, &response, chunked ? 411 : 415,
          chunked ? "Transfer-Encoding: send the body with a Content-Length\n"
                  : "Content-Encoding: send the body as it is\n",
          kText);
    return true;
  }
  const std::optional<uint64_t> bytes = BodyBytes(request);
  if (!bytes.has_value()) {
    Reply(request, &response, 400, "Content-Length: must be one number\n", kText);
    return true;
  }
  if (*bytes > options_.body_bytes_max) {
    Reply(request, &response, 413,
          absl::StrCat("Content-Length: ", *bytes, ", must be 0 to ", options_.body_bytes_max, "\n"), kText);
    return true;
  }
  if (request.path == "/-/healthy" || request.path == "/-/ready") {
    const bool read = request.method == "GET" || request.method == "HEAD";
    if (!read) {
      response.set_header("Allow", "GET, HEAD");
      Reply(request, &response, 405, "this is read: use GET\n", kText);
    }
    if (!read || request.path == "/-/healthy") return !read;
  }
  if (sources_.access == nullptr) return false;
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

std::optional<GrantPtr> HttpServerImpl::MayAll(const Request& request, Response& response, Role role) const {
  std::optional<GrantPtr> grant = Identify(request, response);
  if (!grant.has_value() || *grant == nullptr) return grant;
  const absl::Status allowed = (*grant)->CheckAll(role);
  if (allowed.ok()) return grant;
  (*grant)->Note(request.path, "", allowed, role == Role::kAdmin);
  ReplyError(request, &response, allowed);
  return std::nullopt;
}

void HttpServerImpl::Get(const Request& request, Response& response) {
  const std::string& path = request.path;
  if (path == "/metrics") {
    if (!MayAll(request, response, Role::kRead).has_value()) return;
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
  const std::optional<GrantPtr> grant = MayAll(request, response, Role::kAdmin);
  if (!grant.has_value()) return;
  const absl::Status reloaded = sources_.reload();
  if (*grant != nullptr) (*grant)->Note(request.path, "", reloaded, /*changes=*/true);
  if (!reloaded.ok()) return ReplyError(request, &response, reloaded);
  Reply(request, &response, 200, "reloaded\n", kText);
}

void HttpServerImpl::Call(const Request& request, Response& response, const std::string& body) {
  const std::optional<GrantPtr> grant = Identify(request, response);
  if (!grant.has_value()) return;
  // By his name, or where he comes from if he has none.
  const std::string who = *grant != nullptr ? (*grant)->who() : "";
  const std::unique_ptr<CallSlots::Place> place = calls_.Enter(who.empty() ? request.remote_addr : who);
  if (place == nullptr) {
    response.set_header("Retry-After", "1");
    return ReplyError(request, &response, absl::UnavailableError("too many queries are under way; come back"));
  }
  std::shared_ptr<const void> memory;
  absl::StatusOr<std::string> answer = sources_.call(
      request.path.substr(sizeof(kApi) - 1), body, *grant, [] { return Engine::Served()->gone(); }, &memory);
  if (!answer.ok()) return ReplyError(request, &response, answer.status());
  Reply(request, &response, 200, *std::move(answer), kJson, std::move(memory));
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
    const std::optional<std::string> text = stream->Next([] { return Engine::Served()->gone(); });
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
