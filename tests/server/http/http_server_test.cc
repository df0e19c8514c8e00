// Goal: the HTTP side serves what its header lists, refuses whom it must, holds
// its limits, and stops.
// Method: the real server on a free loopback port, asked by a real client; the
// calls behind it are recorded.

#include "server/http/http_server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/http/console_assets.h"
#include "server/http/gzip.h"
#include "tests/support/memory_database.h"
#include "tests/support/synthetic_runs.h"

namespace bellwether::server {
namespace {

using ::testing::HasSubstr;

class HttpServerTest : public ::testing::Test {
 protected:
  // `token` opens everything; empty: nobody is asked.
  void Start(HttpOptions options = {}, const std::string& token = "") {
    server_.reset();
    if (!token.empty()) {
      auto access = Access::Open({.page_token = token}, &counters_, Clock::System());
      ASSERT_TRUE(access.ok()) << access.status();
      access_ = *std::move(access);
    }
    options.port = 0;
    options.keepalive_seconds = 1;
    auto server = HttpServer::Start(
        options,
        {.metrics = [this] { return std::string("# page\n") + std::string(metrics_bytes_, 'x') + "\n"; },
         .ready = [this] { return ready_; },
         .reload = reload_,
         .call = [this](const std::string& method, const std::string& body, const GrantPtr&,
                        const std::function<bool()>& cancelled,
                        std::shared_ptr<const void>*) -> absl::StatusOr<std::string> {
           absl::MutexLock lock(&mutex_);
           if (method == "GetMatrix") {  // One that takes until somebody goes.
             ++held_;
             while (!released_ && !cancelled()) {
               mutex_.Unlock();
               std::this_thread::yield();
               mutex_.Lock();
             }
             --held_;
             cancelled_ = cancelled_ || cancelled();
             return "{}";
           }
           calls_.push_back(method + " " + body);
           if (method == "GetRun") return absl::NotFoundError("run \"x\": no such run");
           return "{\"ok\":true}";
         },
         .methods = {"GetRun", "ListRuns"},
         .access = access_.get(),
         .tls = tls_.get(),
         .transition_json = [](const AlertTransition& t) { return absl::StrCat("{\"run\":\"", t.run_name, "\"}"); },
         .runs = &table_,
         .alerts = &alerts_,
         .counters = &counters_});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  httplib::Client Client() {
    httplib::Client client("127.0.0.1", server_->port());
    client.set_read_timeout(20);
    return client;
  }
  std::string LastCall() {
    absl::MutexLock lock(&mutex_);
    return calls_.empty() ? "" : calls_.back();
  }
  // Reads events until `enough` of the text; "" if the stream was refused.
  std::string Listen(const httplib::Headers& headers, const std::function<bool(const std::string&)>& enough) {
    std::string text;
    Client().Get("/api/v1/events", headers, [&](const char* data, size_t size) {
      text.append(data, size);
      return !enough(text);
    });
    return text;
  }
  // A request is counted once its answer is out, which the client may see first.
  void ExpectRequests(const char* path, const char* code, double expected) {
    const Counter* const counter =
        counters_.counter("bellwether_http_requests_total", {{"path", path}, {"code", code}});
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (counter->value() < expected && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    EXPECT_EQ(counter->value(), expected) << path << " " << code;
  }

  MemoryDatabase database_;
  AlertStore alerts_{&database_};
  RunTable table_;
  Counters counters_;
  size_t metrics_bytes_ = 5000;
  absl::Status ready_ = absl::OkStatus();
  std::function<absl::Status()> reload_;
  absl::Mutex mutex_;
  std::vector<std::string> calls_ ABSL_GUARDED_BY(mutex_);
  int held_ ABSL_GUARDED_BY(mutex_) = 0;
  bool released_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<Access> access_;
  std::unique_ptr<TlsWatch> tls_;
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, ReloadNeedsItsOptionAndAPost) {
  Start();
  EXPECT_EQ(Client().Post("/-/reload", "", "application/json")->status, 403) << "off";
  absl::Status outcome = absl::OkStatus();
  int reloads = 0;
  reload_ = [&] {
    ++reloads;
    return outcome;
  };
  Start({}, "secret");
  const httplib::Headers allowed = {{"Authorization", "Bearer secret"}};
  EXPECT_EQ(Client().Post("/-/reload", "", "application/json")->status, 401);
  EXPECT_EQ(Client().Post("/-/reload", allowed, "", "text/plain")->status, 415) << "another site's form";
  const auto read = Client().Get("/-/reload", allowed);
  EXPECT_EQ(read->status, 405);
  EXPECT_EQ(read->get_header_value("Allow"), "POST");
  EXPECT_EQ(reloads, 0);
  EXPECT_EQ(Client().Post("/-/reload", allowed, "", "application/json")->body, "reloaded\n");
  EXPECT_EQ(reloads, 1);
  outcome = absl::InvalidArgumentError("rules.yml:1:2: wrong");
  const auto refused = Client().Post("/-/reload", allowed, "", "application/json");
  EXPECT_EQ(refused->status, 400);
  EXPECT_THAT(refused->body, HasSubstr("rules.yml:1:2: wrong"));
  ExpectRequests("/-/reload", "400", 1);
}

TEST_F(HttpServerTest, ServesMetricsProbesAndPage) {
  Start();
  auto client = Client();
  const auto metrics = client.Get("/metrics");
  EXPECT_EQ(metrics->status, 200);
  EXPECT_EQ(metrics->get_header_value("Content-Type"), "text/plain; version=0.0.4; charset=utf-8");
  EXPECT_THAT(metrics->body, HasSubstr("# page"));
  EXPECT_EQ(client.Get("/-/healthy")->status, 200);
  EXPECT_EQ(client.Get("/-/ready")->status, 200);
  ready_ = absl::UnavailableError("replaying the log");
  const auto not_ready = client.Get("/-/ready");
  EXPECT_EQ(not_ready->status, 503);
  EXPECT_EQ(not_ready->body, "replaying the log\n");
  EXPECT_EQ(client.Get("/-/healthy")->status, 200);
  EXPECT_EQ(client.Get("/nothing/here")->status, 404);
  EXPECT_EQ(client.Delete("/metrics")->status, 404);
  ExpectRequests("/metrics", "200", 1);
  ExpectRequests("/-/ready", "503", 1);
  ExpectRequests("other", "404", 1);
}

TEST_F(HttpServerTest, EveryAnswerHasSecurityHeaders) {
  Start();
  auto client = Client();
  for (const char* path : {"/", "/metrics", "/api/v1/ListRuns", "/nothing"}) {
    const auto answer = client.Get(path);
    const std::string policy = answer->get_header_value("Content-Security-Policy");
    EXPECT_THAT(policy, HasSubstr("default-src 'self'")) << path;
    EXPECT_THAT(policy, Not(HasSubstr("unsafe"))) << path;
    EXPECT_EQ(answer->get_header_value("X-Content-Type-Options"), "nosniff") << path;
  }
}

TEST_F(HttpServerTest, AssetsComeZippedTaggedAndWithoutInlineScript) {
  Start();
  auto client = Client();
  if (ConsoleAssets().empty()) GTEST_SKIP() << "built with BELLWETHER_CONSOLE=OFF";
  const auto plain = client.Get("/", {{"Accept-Encoding", ""}});
  EXPECT_EQ(plain->status, 200);
  EXPECT_THAT(plain->body, HasSubstr("<div id=\"app\">"));
  EXPECT_EQ(plain->body.find("<script>"), std::string::npos);
  EXPECT_EQ(plain->body.find("://"), std::string::npos) << "an address of another server";
  size_t zipped = 0;
  for (const ConsoleAsset& asset : ConsoleAssets()) zipped += asset.gzipped.size();
  EXPECT_LE(zipped, 120u * 1024);
  const auto script = client.Get("/console.js", {{"Accept-Encoding", "gzip, br"}});
  EXPECT_EQ(script->get_header_value("Content-Encoding"), "gzip");
  const auto again = client.Get("/console.js", {{"If-None-Match", script->get_header_value("ETag")}});
  EXPECT_EQ(again->status, 304);
  EXPECT_EQ(again->body, "");
  EXPECT_EQ(Client().Get("/console.js", {{"If-None-Match", "\"other\""}})->status, 200);
}

TEST_F(HttpServerTest, CallsByPostAndByAddress) {
  Start();
  auto client = Client();
  EXPECT_EQ(client.Post("/api/v1/ListRuns", "{\"limit\":3}", "application/json")->body, "{\"ok\":true}");
  EXPECT_EQ(LastCall(), "ListRuns {\"limit\":3}");
  EXPECT_EQ(client.Get("/api/v1/ListAlerts?run=a%2Fb&limit=3&firing_only=true")->status, 200);
  EXPECT_EQ(LastCall(), R"(ListAlerts {"firing_only":true,"limit":"3","run":"a/b"})");
  client.Get("/api/v1/GetSeries?series={\"signal\":\"loss\"}&series={\"signal\":\"x\"}");
  EXPECT_EQ(LastCall(), R"(GetSeries {"series":[{"signal":"loss"},{"signal":"x"}]})");
  EXPECT_EQ(client.Get("/api/v1/GetSeries?series={bad")->status, 400);
  const auto missing = client.Get("/api/v1/GetRun?run=x");
  EXPECT_EQ(missing->status, 404);
  EXPECT_EQ(nlohmann::json::parse(missing->body)["code"], "NOT_FOUND");
}

TEST_F(HttpServerTest, OtherSitesCannotChangeAnything) {
  Start();
  auto client = Client();
  EXPECT_EQ(client.Get("/api/v1/AcknowledgeAlert?run=x&key=y")->status, 405);
  EXPECT_EQ(client.Post("/api/v1/AcknowledgeAlert", "{}", "text/plain")->status, 415);
  EXPECT_EQ(LastCall(), "");
  EXPECT_EQ(client.Get("/metrics", {{"Host", "evil.example:7071"}})->status, 421);
  EXPECT_EQ(client.Get("/metrics", {{"Host", "localhost:7071"}})->status, 200);
  EXPECT_EQ(client.Get("/metrics", {{"Host", "[::1]:7071"}})->status, 200);
}

TEST_F(HttpServerTest, NamedHostsAreAllowed) {
  Start({.hosts = {"watch.example"}});
  auto client = Client();
  EXPECT_EQ(client.Get("/metrics", {{"Host", "watch.example"}})->status, 200);
  EXPECT_EQ(client.Get("/metrics", {{"Host", "other.example"}})->status, 421);
}

TEST_F(HttpServerTest, ATokenIsWantedEverywhereButForHealth) {
  Start({}, "s3cret");
  auto client = Client();
  EXPECT_EQ(client.Get("/-/healthy")->status, 200);
  EXPECT_EQ(client.Get("/")->status, 401);
  EXPECT_EQ(client.Get("/metrics")->status, 401);
  EXPECT_EQ(client.Get("/metrics", {{"Authorization", "Bearer s3cre"}})->status, 401);
  EXPECT_EQ(client.Get("/metrics", {{"Authorization", "Bearer s3crets"}})->status, 401);
  EXPECT_EQ(client.Get("/metrics", {{"Authorization", "Bearer s3cret"}})->status, 200);
  EXPECT_EQ(client.Get("/?token=wrong")->status, 401);
  const auto door = client.Get("/?token=s3cret");
  EXPECT_EQ(door->status, 303);
  EXPECT_EQ(door->get_header_value("Location"), "./");
  const std::string cookie = door->get_header_value("Set-Cookie");
  EXPECT_THAT(cookie, HasSubstr("HttpOnly"));
  EXPECT_THAT(cookie, HasSubstr("SameSite=Strict"));
  EXPECT_EQ(client.Get("/metrics", {{"Cookie", "a=b; " + cookie.substr(0, cookie.find(';'))}})->status, 200);
}

TEST_F(HttpServerTest, BodiesUpToTheLimitOnly) {
  Start({.body_bytes_max = 1000});
  auto client = Client();
  EXPECT_EQ(client.Post("/api/v1/ListRuns", std::string(1000, ' '), "application/json")->status, 200);
  EXPECT_EQ(client.Post("/api/v1/ListRuns", std::string(1001, ' '), "application/json")->status, 413);
}

TEST_F(HttpServerTest, EventsTellTransitionsAndRunsAndResume) {
  Start({.events = {.tick_ns = 10'000'000}});
  const SyntheticRun run{.name = "ill", .failing = {1, 0}, .stage = 1};
  AlertTransition alert = MakeAlert(run, Severity::kWarning, "drift", 0);
  ASSERT_TRUE(alerts_.Post(alert).ok());
  bool published = false;
  const std::string text = Listen({}, [&](const std::string& so_far) {
    if (!published && absl::StrContains(so_far, "event: resync")) {
      published = true;
      table_.Publish(MakeSnapshot(run, 1));
      alert.k = 1;
      EXPECT_TRUE(alerts_.Post(alert).ok());
    }
    return absl::StrContains(so_far, "event: alert") && absl::StrContains(so_far, "event: runs");
  });
  EXPECT_THAT(text, HasSubstr("id: 2\nevent: alert\ndata: {\"run\":\"ill\"}"));
  EXPECT_THAT(text, HasSubstr("{\"runs\":[\"ill\"]}"));
  EXPECT_EQ(text.find("id: 1\nevent: alert"), std::string::npos) << "happened before this reader came";
  // A reader who saw nothing after id 0 hears both.
  EXPECT_THAT(Listen({{"Last-Event-ID", "0"}},
                     [](const std::string& so_far) { return absl::StrContains(so_far, "id: 2\nevent"); }),
              HasSubstr("id: 1\nevent: alert"));
}

TEST_F(HttpServerTest, StreamsUpToTheLimitThen503) {
  Start({.events = {.streams_max = 2, .tick_ns = 10'000'000}});
  const auto enough = [](const std::string& text) { return absl::StrContains(text, "resync"); };
  // Each opens the next one while it is open itself.
  const std::string first = Listen({}, [&](const std::string& outer) {
    if (!enough(outer)) return false;
    EXPECT_THAT(Listen({},
                       [&](const std::string& inner) {
                         if (!enough(inner)) return false;
                         EXPECT_EQ(counters_.gauge("bellwether_console_streams")->value(), 2);
                         const auto refused = Client().Get("/api/v1/events");
                         EXPECT_EQ(refused->status, 503);
                         EXPECT_EQ(refused->get_header_value("Retry-After"), "30");
                         return true;
                       }),
                HasSubstr("resync"));
    return true;
  });
  EXPECT_THAT(first, HasSubstr("resync"));
  ExpectRequests("/api/v1/events", "503", 1);
}

TEST_F(HttpServerTest, StopEndsStreamsAndFreesThePort) {
  Start({.events = {.tick_ns = 10'000'000}});
  const int port = server_->port();
  std::thread reader([this] { Listen({}, [](const std::string&) { return false; }); });
  while (counters_.gauge("bellwether_console_streams")->value() < 1) std::this_thread::yield();
  server_->Stop();
  reader.join();
  EXPECT_FALSE(httplib::Client("127.0.0.1", port).Get("/-/healthy"));
  server_->Stop();  // Again: nothing happens.
}

// A connection from `address` of this machine that says nothing.
int Connect(const char* address, int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in from{}, to{};
  from.sin_family = to.sin_family = AF_INET;
  inet_pton(AF_INET, address, &from.sin_addr);
  inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
  to.sin_port = htons(static_cast<uint16_t>(port));
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&from), sizeof(from)), 0);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
  return fd;
}

std::string ReadAll(int fd) {
  std::string text;
  char part[65536];
  for (ssize_t got; (got = recv(fd, part, sizeof(part), 0)) > 0;) text.append(part, static_cast<size_t>(got));
  return text;
}

void SendText(int fd, const std::string& text) {
  EXPECT_EQ(send(fd, text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
}

TEST_F(HttpServerTest, AnAddressHasSoManyConnectionsAndOthersAreServed) {
  HttpOptions options;
  options.connections_per_address_max = 3;
  options.workers_max = 1;
  options.events.streams_max = 1;  // Two are served at once: a waiting one counts as well.
  options.queue_max = 2;
  Start(options);
  const Counter* const refused = counters_.counter("bellwether_http_connections_refused_total", {{"limit", "address"}});
  std::vector<int> held;
  for (int i = 0; i < 3; ++i) held.push_back(Connect("127.0.0.2", server_->port()));
  // In order, so the fourth is behind the three; what it asks for is no health check.
  const int fourth = Connect("127.0.0.2", server_->port());
  SendText(fourth, "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
  EXPECT_THAT(ReadAll(fourth), HasSubstr("503 Service Unavailable"));
  EXPECT_EQ(refused->value(), 1);
  close(fourth);
  // The kept-alive limit of a second ends those that say nothing; another address need not wait for that.
  EXPECT_EQ(Client().Get("/-/healthy")->status, 200);
  EXPECT_EQ(refused->value(), 1);
  for (const int fd : held) close(fd);
  // Room again, once the server has seen their end.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  bool served = false;
  while (!served && std::chrono::steady_clock::now() < deadline) {
    auto client = Client();
    client.set_interface("127.0.0.2");
    const auto answer = client.Get("/-/healthy");
    served = answer && answer->status == 200;
  }
  EXPECT_TRUE(served);
}

TEST_F(HttpServerTest, AnAnswerTakesAsLongAsItsReader) {
  metrics_bytes_ = 64 << 20;
  Start({.request_seconds_max = 1, .write_seconds_max = 60});
  std::string answer;
  // Where this machine halts for a second the request itself is late, and nothing of it is answered.
  for (int tries = 0; tries < 10 && answer.empty(); ++tries) {
    const int fd = Connect("127.0.0.1", server_->port());
    SendText(fd, "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n");
    // More than the kernel takes at once, and twice the time of a request until it is read.
    std::this_thread::sleep_for(std::chrono::seconds(2));
    answer = ReadAll(fd);
    close(fd);
  }
  EXPECT_GT(answer.size(), metrics_bytes_);
}

TEST_F(HttpServerTest, HealthChecksOfAFullAddressAreAnswered) {
  HttpOptions options;
  options.connections_per_address_max = 2;
  Start(options);
  const auto stream = [this] {
    const int fd = Connect("127.0.0.2", server_->port());
    SendText(fd, "GET /api/v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
    char byte = 0;
    EXPECT_EQ(recv(fd, &byte, 1, 0), 1);
    return fd;
  };
  std::vector<int> held = {stream(), stream()};
  auto client = Client();
  client.set_interface("127.0.0.2");
  const auto status = [&](const char* path) {
    const auto answer = client.Get(path);
    return answer ? answer->status : 0;
  };
  for (const char* const path : {"/-/ready", "/-/healthy", "/metrics"}) EXPECT_EQ(status(path), 200) << path;
  EXPECT_EQ(status("/api/v1/ListRuns"), 503);
  // Nor do those shut it out that stand there and say nothing.
  std::vector<int> silent;
  for (int i = 0; i < 100; ++i) silent.push_back(Connect("127.0.0.2", server_->port()));
  for (const char* const path : {"/-/ready", "/-/healthy", "/metrics"}) EXPECT_EQ(status(path), 200) << path;
  for (const int fd : silent) close(fd);
  // Whose stream's reader has gone has his place again within moments, not at the next word.
  const auto began = std::chrono::steady_clock::now();
  for (const int fd : held) close(fd);
  while (status("/api/v1/ListRuns") != 200 && std::chrono::steady_clock::now() - began < std::chrono::seconds(60)) {
    std::this_thread::yield();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(8)) << "a comment comes after 15 s";
}

TEST_F(HttpServerTest, RequestsOfOneConnectionAreAnsweredInOrder) {
  Start();
  const int fd = Connect("127.0.0.1", server_->port());
  std::string all;
  for (int i = 0; i < 20; ++i) {
    absl::StrAppend(&all, "POST /api/v1/ListRuns HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n",
                    "Content-Length: 2\r\n\r\n", i + 10);
  }
  SendText(fd, all + "GET /-/ready HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n");
  const std::string answers = ReadAll(fd);
  EXPECT_THAT(answers, HasSubstr("ready\n"));
  close(fd);
  absl::MutexLock lock(&mutex_);
  ASSERT_EQ(calls_.size(), 20u);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(calls_[static_cast<size_t>(i)], absl::StrCat("ListRuns ", i + 10));
}

TEST_F(HttpServerTest, LongestWaitingConnectionIsClosedForANewOne) {
  HttpOptions options;
  options.workers_max = options.events.streams_max = 1;
  options.queue_max = 2;
  Start(options);
  std::vector<int> held;
  for (int i = 0; i < 4; ++i) held.push_back(Connect("127.0.0.2", server_->port()));
  EXPECT_EQ(Client().Get("/metrics")->status, 200);
  EXPECT_EQ(ReadAll(held.front()), "") << "closed for that";
  EXPECT_GE(counters_.counter("bellwether_http_connections_refused_total", {{"limit", "connections"}})->value(), 1);
  for (const int fd : held) close(fd);
}

TEST_F(HttpServerTest, CallsBeyondLimitGet503AndClosedOnesFreePlaces) {
  Start({.calls = {.running_max = 2, .waiting_max = 0, .wait_ns_max = 0}});
  const auto held = [this](int count) {
    absl::MutexLock lock(&mutex_);
    const auto so_many = [this, count]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return held_ == count; };
    return mutex_.AwaitWithTimeout(absl::Condition(&so_many), absl::Seconds(20));
  };
  const int first = Connect("127.0.0.2", server_->port());
  SendText(first, "GET /api/v1/GetMatrix HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
  ASSERT_TRUE(held(1));
  auto same = Client();
  same.set_interface("127.0.0.2");
  const auto refused = same.Get("/api/v1/ListRuns");
  EXPECT_EQ(refused->status, 503) << "his half";
  EXPECT_EQ(refused->get_header_value("Retry-After"), "1");
  EXPECT_EQ(Client().Get("/api/v1/ListRuns")->status, 200);
  EXPECT_EQ(same.Get("/metrics")->status, 200) << "no query";
  close(first);
  EXPECT_TRUE(held(0)) << "nobody waits for it";
  // The call has ended; its place is given back a moment after that.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  int status = 503;
  while (status == 503 && std::chrono::steady_clock::now() < deadline) status = same.Get("/api/v1/ListRuns")->status;
  EXPECT_EQ(status, 200) << "his place is free again";
  absl::MutexLock lock(&mutex_);
  EXPECT_TRUE(cancelled_);
}

TEST(EventStreamTest, UnreadableAlertsAreReadOncePerTick) {
  class Broken final : public MemoryDatabase {
   public:
    absl::StatusOr<std::vector<AlertTransition>> ListTransitions(uint64_t, size_t, RunId) const override {
      ++reads;
      return absl::DataLossError("damaged");
    }
    uint64_t last_transition_id() const override { return 7; }
    mutable std::atomic<int> reads = 0;
  };
  Broken database;
  AlertStore alerts(&database);
  RunTable table;
  Counters counters;
  EventHub hub({.tick_ns = 50'000'000}, &table, &alerts, &counters, [](const AlertTransition&) { return ""; });
  const auto stream = hub.Open(3);
  stream->Next();  // The greeting.
  database.reads = 0;
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 5; ++i) stream->Next();
  EXPECT_EQ(database.reads, 5);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(4 * 50));
}

TEST_F(HttpServerTest, HeadsUpToTheLimitOnly) {
  Start();
  auto client = Client();
  const std::string line(8000, 'x');
  EXPECT_EQ(client.Get("/metrics", {{"A", line}, {"B", line}, {"C", line}})->status, 200);
  EXPECT_EQ(client.Get("/metrics", {{"A", line}, {"B", line}, {"C", line}, {"D", line}, {"E", line}})->status, 431);
  EXPECT_EQ(counters_.counter("bellwether_http_connections_refused_total", {{"limit", "head"}})->value(), 1);
}

TEST_F(HttpServerTest, BodiesComePlainAndWithTheirLength) {
  Start();
  const std::string post = "POST /api/v1/ListRuns HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n";
  for (const auto& [header, status] :
       std::vector<std::pair<std::string, std::string>>{{"Transfer-Encoding: chunked\r\n", "411"},
                                                        {"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n", "411"},
                                                        {"Content-Encoding: gzip\r\nContent-Length: 2\r\n", "415"},
                                                        {"Content-Length: 2\r\nContent-Length: 20\r\n", "400"},
                                                        {"Content-Length: -2\r\n", "400"},
                                                        {"Content-Length: 18446744073709551615\r\n", "413"},
                                                        {"Content-Length: 99999999999999999999\r\n", "400"}}) {
    const int fd = Connect("127.0.0.1", server_->port());
    SendText(fd, post + header + "\r\n{}GET /-/ready HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
    const std::string answer = ReadAll(fd);
    EXPECT_EQ(answer.substr(9, 3), status) << header;
    EXPECT_EQ(answer.find("HTTP/1.1", 1), std::string::npos) << header << "a second answer";
    close(fd);
  }
  EXPECT_EQ(LastCall(), "");
}

TEST_F(HttpServerTest, ATakenPortIsAClearError) {
  Start();
  const auto second =
      HttpServer::Start({.port = server_->port()}, {.transition_json = [](const AlertTransition&) { return ""; },
                                                    .runs = &table_,
                                                    .alerts = &alerts_,
                                                    .counters = &counters_});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(absl::StrCat(server_->port())));
}

TEST(GzipTest, RoundTripWithinItsCap) {
  std::string text;
  for (int i = 0; i < 20'000; ++i) absl::StrAppend(&text, i, " ");
  const std::string zipped = Gzip(text);
  EXPECT_LT(zipped.size(), text.size() / 2);
  EXPECT_EQ(Gunzip(zipped, text.size()), text);
  EXPECT_EQ(Gunzip(zipped, text.size() - 1), "");
  EXPECT_EQ(Gunzip("no gzip at all", 1000), "");
}

}  // namespace
}  // namespace bellwether::server
