// Goal: whatever a receiver does, an attempt ends in its time, keeps little, and what is told of it is
// one clean line; TLS is checked; a stop ends what is under way.
// Method: strangers on raw sockets, each with a deed of its own; times are cut to a part of a second.

#include "server/export/http_post.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include "server/access/authority.h"
#include "server/util/clean_text.h"
#include "server/util/clock.h"
#include "tests/server/export/stranger.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kPostPatience = std::chrono::seconds(20);
constexpr int64_t kLongNs = 10'000'000'000;  // What an answer has that must come, on a busy machine, too.
constexpr char kHead[] = "HTTP/1.1 200 OK\r\n";

class HttpPostTest : public ::testing::Test {
 protected:
  // What came of a POST to `url`, by a proxy if one is named.
  absl::Status Post(const std::string& url,
                    HttpPostLimits limits = {.timeout_ns = 400'000'000, .body_ns_max = 100'000'000},
                    const std::string& proxy = "") {
    HttpPoster poster(*SplitUrl(url), proxy.empty() ? UrlParts() : *SplitProxyUrl(proxy), limits, "test", &counters_);
    const auto start = steady_clock::now();
    absl::Status status = poster.Post(R"({"a": 1})");
    EXPECT_LT(steady_clock::now() - start, kPostPatience);
    return status;
  }
  double Failed(const char* cause) {
    return counters_.counter("bellwether_notification_attempts_failed_total", {{"channel", "test"}, {"cause", cause}})
        ->value();
  }
  double Cut() {
    return counters_.counter("bellwether_notification_answers_cut_total", {{"channel", "test"}})->value();
  }

  Counters counters_;
};

// An answer, behind the whole request.
Stranger::Deed Answers(std::string text) {
  return [text = std::move(text)](Stranger* stranger, int fd) {
    stranger->TakeRequest(fd);
    stranger->Send(fd, text);
  };
}

struct Hostile {
  const char* name;
  Stranger::Deed deed;
  const char* cause;  // "": the receiver has it.
  const char* says;
};

std::vector<Hostile> Hostiles() {
  using S = Stranger;
  const std::string mebibyte(1 << 20, 'A');
  return {
      {"big", [=](S* s, int fd) { s->Send(fd, "HTTP/1.1 500 X\r\n\r\n"), s->SendOn(fd, mebibyte); }, "status",
       "answered 500 AAAA"},
      {"big and good", [=](S* s, int fd) { s->Send(fd, std::string(kHead) + "\r\n"), s->SendOn(fd, mebibyte); }, "",
       ""},
      {"big chunks",
       [=](S* s, int fd) {
         s->Send(fd, std::string(kHead) + "Transfer-Encoding: chunked\r\n\r\n");
         s->SendOn(fd, "100000\r\n" + mebibyte + "\r\n");
       },
       "", ""},
      {"gzip",
       [=](S* s, int fd) {
         s->Send(fd, "HTTP/1.1 500 X\r\nContent-Encoding: gzip\r\n\r\n\x1f\x8b");
         s->SendOn(fd, std::string(4096, '\0'));
       },
       "status", "answered 500"},
      {"slow body",
       [](S* s, int fd) {
         s->Send(fd, "HTTP/1.1 500 X\r\nContent-Length: 100000\r\n\r\n");
         s->SendOn(fd, "a", milliseconds(20));
       },
       "status", "answered 500 a"},
      {"slow body and good",
       [](S* s, int fd) {
         s->Send(fd, std::string(kHead) + "Content-Length: 100000\r\n\r\n");
         s->SendOn(fd, "a", milliseconds(20));
       },
       "", ""},
      {"slow head", [](S* s, int fd) { s->Send(fd, kHead), s->SendOn(fd, "X-A: b\r\n", milliseconds(20)); }, "timeout",
       "its head did not end"},
      {"slow status", [](S* s, int fd) { s->Send(fd, "HTTP/1.1 "), s->Hang(fd); }, "timeout", "its head did not end"},
      {"hang", [](S* s, int fd) { s->Hang(fd); }, "timeout", "no answer"},
      {"endless headers", [](S* s, int fd) { s->Send(fd, kHead), s->SendOn(fd, "X-A: b\r\n"); }, "answer",
       "a head of more than 16384 bytes"},
      {"a long header", [=](S* s, int fd) { s->Send(fd, std::string(kHead) + "X: "), s->SendOn(fd, mebibyte); },
       "answer", "a head of more than 16384 bytes"},
      {"a long reason", [=](S* s, int fd) { s->Send(fd, "HTTP/1.1 200 "), s->SendOn(fd, mebibyte); }, "answer",
       "a head of more than 16384 bytes"},
      {"interim ones", [](S* s, int fd) { s->SendOn(fd, "HTTP/1.1 100 Continue\r\n\r\n"); }, "answer",
       "a head of more than 16384 bytes"},
      {"slow interim ones", [](S* s, int fd) { s->SendOn(fd, "HTTP/1.1 103 E\r\n\r\n", milliseconds(20)); }, "timeout",
       "its head did not end"},
      {"another protocol", Answers("HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n"), "status", "answered 101"},
      {"garbage", [](S* s, int fd) { s->SendOn(fd, "\x01\x02\x03\xff garbage"); }, "answer", "what is no HTTP"},
      {"HTTP/2", Answers(std::string("\0\0\x06\x04\0\0\0\0\0", 9)), "answer", "what is no HTTP"},
      {"a status of many digits", Answers("HTTP/1.1 99999999999999999999 OK\r\n\r\n"), "answer", "what is no HTTP"},
      {"a status below", Answers("HTTP/1.1 099 OK\r\n\r\n"), "answer", "what is no HTTP"},
      {"a negative status", Answers("HTTP/1.1 -20 OK\r\n\r\n"), "answer", "what is no HTTP"},
      {"a length beyond", Answers("HTTP/1.1 500 OK\r\nContent-Length: 18446744073709551615\r\n\r\nabc"), "status",
       "answered 500 abc"},
      {"a length beyond 64 bits", Answers("HTTP/1.1 500 OK\r\nContent-Length: 99999999999999999999\r\n\r\nabc"),
       "status", "answered 500 abc"},
      {"chunks that lie", Answers("HTTP/1.1 500 X\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nabc\r\n"),
       "status", "answered 500"},
      {"escapes",
       Answers("HTTP/1.1 500 X\r\n\r\n\x1b[31mred\nts=2026 level=error msg=\"forged log line\" \xff\xc2\x9b"), "status",
       "answered 500  [31mred ts=2026 level=error"},
      {"ends at once", [](S*, int) {}, "answer", ""},
      {"resets",
       [](S*, int fd) {
         char first = 0;  // Else the reset may come before the client knows that it is connected.
         recv(fd, &first, 1, 0);
         const linger now{.l_onoff = 1, .l_linger = 0};
         setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
       },
       "answer", ""},
      {"to itself", Answers("HTTP/1.1 302 F\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n"), "redirect",
       "answered 302, a redirect, which is not followed: /x"},
      {"to another host", Answers("HTTP/1.1 307 F\r\nLOCATION:http://127.0.0.1:1/secret\x1b\r\n\r\n"), "redirect",
       "http://127.0.0.1:1/secret "},
      {"to a file", Answers("HTTP/1.1 301 F\r\nLocation: file:///etc/passwd\r\n\r\n"), "redirect",
       "answered 301, a redirect"},
      {"an answer without headers", Answers("HTTP/1.0 204\r\n\r\n"), "", ""},
      {"lines that end in LF", Answers("HTTP/1.0 503 Busy\nContent-Length: 3\n\nabcdef"), "status", "answered 503 abc"},
  };
}

TEST_F(HttpPostTest, HostileReceiversAreBoundedAndReportedInOneLine) {
  for (const Hostile& hostile : Hostiles()) {
    SCOPED_TRACE(hostile.name);
    Stranger stranger(hostile.deed);
    const double failed = Failed(hostile.cause);
    const bool waits = hostile.cause == std::string_view("timeout");
    const absl::Status status =
        Post(stranger.url(), {.timeout_ns = waits ? 400'000'000 : kLongNs, .body_ns_max = 500'000'000});
    EXPECT_EQ(status.ok(), *hostile.cause == '\0') << status;
    if (!status.ok()) {
      EXPECT_EQ(Failed(hostile.cause), failed + 1) << status;
    }
    const std::string message(status.message());
    EXPECT_THAT(message, HasSubstr(hostile.says));
    EXPECT_EQ(message, CleanText(message, 500));
    EXPECT_EQ(stranger.connections(), 1) << "a redirect was followed";
    EXPECT_LT(stranger.sent(), size_t{32} << 20) << "what the sockets' buffers take, not what there was";
  }
  EXPECT_GE(Cut(), 5);
}

TEST_F(HttpPostTest, RequestIsCompleteAndAnswerIsReadToItsEnd) {
  std::string request;
  for (const char* answer :
       {"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 202 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\n\r\nuntil its end"}) {
    Stranger stranger([&](Stranger* self, int fd) {
      request = self->TakeRequest(fd);
      self->Send(fd, answer);
    });
    EXPECT_EQ(Post(absl::StrCat("http://127.0.0.1:", stranger.port(), "/x/\xc3\xa4?b=c"),
                   {.timeout_ns = kLongNs, .body_ns_max = kLongNs}),
              absl::OkStatus());
    EXPECT_THAT(request, HasSubstr("POST /x/%C3%A4?b=c HTTP/1.1\r\n"));
    EXPECT_THAT(request, HasSubstr(absl::StrCat("\r\nHost: 127.0.0.1:", stranger.port(), "\r\n")));
    EXPECT_THAT(request, HasSubstr("\r\nContent-Type: application/json\r\nContent-Length: 8\r\n"));
    EXPECT_THAT(request, HasSubstr("\r\n\r\n{\"a\": 1}"));
  }
  EXPECT_EQ(Cut(), 0);
}

TEST_F(HttpPostTest, ReceiverThatReadsNoRequestTimesOut) {
  Stranger stranger([](Stranger* self, int) {
    while (!self->over()) std::this_thread::sleep_for(milliseconds(5));
  });
  HttpPoster poster(*SplitUrl(stranger.url()), {}, {.timeout_ns = 2'000'000'000}, "test", &counters_);
  EXPECT_THAT(std::string(poster.Post(std::string(24 << 20, 'x')).message()), HasSubstr("the request was not taken"));
}

TEST_F(HttpPostTest, RefusedConnectionAndUnknownNameAreReported) {
  std::string url;
  {
    Stranger gone([](Stranger*, int) {});
    url = gone.url();
  }
  EXPECT_THAT(std::string(Post(url).message()), HasSubstr("Connection refused"));
  EXPECT_EQ(Failed("connect"), 1);
  EXPECT_FALSE(Post("http://no-such-name.invalid/x", {.timeout_ns = 1'000'000'000}).ok());
  EXPECT_EQ(Failed("name") + Failed("timeout"), 1);
}

TEST_F(HttpPostTest, StopEndsCurrentAndLaterPosts) {
  std::atomic<bool> there = false;
  Stranger stranger([&](Stranger* self, int fd) {
    there = true;
    self->Hang(fd);
  });
  HttpPoster poster(*SplitUrl(stranger.url()), {}, {.timeout_ns = 3600'000'000'000}, "test", &counters_);
  absl::Status status;
  std::thread posts([&] { status = poster.Post("{}"); });
  const auto deadline = steady_clock::now() + kPostPatience;
  while (!there && steady_clock::now() < deadline) std::this_thread::yield();
  const auto start = steady_clock::now();
  poster.EndBy(Clock::System()->MonotonicNanos() + 50'000'000);
  posts.join();
  EXPECT_LT(steady_clock::now() - start, kPostPatience);
  EXPECT_THAT(std::string(status.message()), HasSubstr("given up at the server's end"));
  EXPECT_FALSE(poster.Post("{}").ok());
  EXPECT_EQ(Failed("stop"), 2);
}

// A server with a certificate for `host` by an authority that this process trusts.
class HttpPostTlsTest : public HttpPostTest {
 protected:
  void SetUp() override {
    const Validity validity{.begin_unix_s = Clock::System()->UnixNanos() / 1'000'000'000 - 60, .days = 1};
    const auto ca = NewAuthority("test", validity);
    ASSERT_TRUE(ca.ok()) << ca.status();
    const auto authority = Authority::Load(ca->certificate, ca->key);
    ASSERT_TRUE(authority.ok());
    const auto server = authority->IssueServer({"localhost"}, validity);
    ASSERT_TRUE(server.ok());
    Write("ca.pem", ca->certificate);
    Write("server.pem", server->certificate);
    Write("server.key", server->key);
    server_.emplace(Path("server.pem").c_str(), Path("server.key").c_str());
    server_->Post(
        "/x", [](const httplib::Request&, httplib::Response& response) { response.set_content("ok", "text/plain"); });
    port_ = server_->bind_to_any_port("127.0.0.1");
    thread_ = std::thread([this] { server_->listen_after_bind(); });
    while (!server_->is_running()) std::this_thread::yield();
  }
  void TearDown() override {
    unsetenv("SSL_CERT_FILE");
    server_->stop();
    thread_.join();
  }
  std::string Path(const char* name) const { return (std::filesystem::path(folder_.path()) / name).string(); }
  void Write(const char* name, const std::string& text) const { std::ofstream(Path(name)) << text; }
  absl::Status PostTo(const char* host) {
    return Post(absl::StrCat("https://", host, ":", port_, "/x"), {.timeout_ns = kLongNs});
  }

  TempDirectory folder_;
  std::optional<httplib::SSLServer> server_;
  int port_ = 0;
  std::thread thread_;
};

TEST_F(HttpPostTlsTest, OnlyHostsOwnCertificateByKnownAuthorityIsTrusted) {
  EXPECT_THAT(std::string(PostTo("localhost").message()), HasSubstr("TLS: unable to get local issuer certificate"));
  setenv("SSL_CERT_FILE", Path("ca.pem").c_str(), 1);
  EXPECT_EQ(PostTo("localhost"), absl::OkStatus());
  EXPECT_THAT(std::string(PostTo("127.0.0.1").message()), HasSubstr("TLS: IP address mismatch"));
  EXPECT_EQ(Failed("tls"), 2);
}

// A proxy that connects whoever asks to `port` of this machine, and keeps what it was asked.
Stranger::Deed Tunnels(int port, std::string* asked) {
  return [=](Stranger* self, int fd) {
    std::array<char, 4096> some;
    asked->clear();
    while (!self->over() && asked->find("\r\n\r\n") == std::string::npos) {
      const ssize_t got = recv(fd, some.data(), some.size(), 0);
      if (got <= 0) return;
      asked->append(some.data(), static_cast<size_t>(got));
    }
    const int to = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    ASSERT_EQ(connect(to, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    self->Send(fd, "HTTP/1.1 200 Connection established\r\n\r\n");
    for (bool open = true; open && !self->over();) {
      std::array<pollfd, 2> polled{pollfd{fd, POLLIN, 0}, pollfd{to, POLLIN, 0}};
      if (poll(polled.data(), polled.size(), 10) <= 0) continue;
      for (size_t from = 0; from < polled.size() && open; ++from) {
        if (polled[from].revents == 0) continue;
        const ssize_t got = recv(polled[from].fd, some.data(), some.size(), 0);
        open = got > 0 && self->Send(polled[1 - from].fd, std::string(some.data(), static_cast<size_t>(got)));
      }
    }
    close(to);
  };
}

TEST_F(HttpPostTlsTest, TunnelThroughProxyKeepsTlsToTheReceiver) {
  std::string asked;
  absl::Status unknown, known;
  {
    Stranger proxy(Tunnels(port_, &asked));
    const std::string by = absl::StrCat("http://127.0.0.1:", proxy.port());
    const std::string url = absl::StrCat("https://localhost:", port_, "/x");
    unknown = Post(url, {.timeout_ns = kLongNs}, by);
    setenv("SSL_CERT_FILE", Path("ca.pem").c_str(), 1);
    known = Post(url, {.timeout_ns = kLongNs}, by);
    EXPECT_EQ(proxy.connections(), 2);
  }
  EXPECT_THAT(std::string(unknown.message()), AllOf(HasSubstr("by the proxy http://127.0.0.1"), HasSubstr("TLS: ")));
  EXPECT_EQ(known, absl::OkStatus());
  const std::string host = absl::StrCat("localhost:", port_);
  EXPECT_THAT(asked, ::testing::StartsWith(absl::StrCat("CONNECT ", host, " HTTP/1.1\r\nHost: ", host, "\r\n")));
  EXPECT_THAT(asked, ::testing::Not(HasSubstr("POST")));
}

TEST_F(HttpPostTest, ProxyIsToldTheWholeAddressOfPlainReceivers) {
  std::string asked;
  {
    Stranger proxy([&](Stranger* self, int fd) {
      asked = self->TakeRequest(fd);
      self->Send(fd, "HTTP/1.1 204 No Content\r\n\r\n");
    });
    const std::string by = absl::StrCat("http://127.0.0.1:", proxy.port());
    EXPECT_EQ(Post("http://receiver.invalid:81/a/b?c", {.timeout_ns = kLongNs}, by), absl::OkStatus());
  }
  EXPECT_THAT(asked, ::testing::StartsWith("POST http://receiver.invalid:81/a/b?c HTTP/1.1\r\n"
                                           "Host: receiver.invalid:81\r\n"));
}

TEST_F(HttpPostTest, HostileProxyCostsNoMoreThanHostileReceiver) {
  const auto by = [&](Stranger::Deed deed, HttpPostLimits limits) {
    Stranger proxy(std::move(deed));
    return std::string(
        Post("https://receiver.invalid/x", limits, absl::StrCat("http://127.0.0.1:", proxy.port())).message());
  };
  const HttpPostLimits is_long{.timeout_ns = kLongNs}, is_short{.timeout_ns = 400'000'000};
  const auto answers = [](std::string text) {
    return [text = std::move(text)](Stranger* self, int fd) { self->Send(fd, text), self->Hang(fd); };
  };
  EXPECT_THAT(by(answers("HTTP/1.1 407 Who are you\r\n\r\n"), is_long), HasSubstr("the proxy answered 407"));
  EXPECT_THAT(by(answers("HTTP/1.1 200 OK\r\n\r\nand more"), is_long), HasSubstr("sent more than its answer"));
  EXPECT_EQ(Failed("proxy"), 2);
  EXPECT_THAT(by(answers("SSH-2.0-x\r\n"), is_long), HasSubstr("answered what is no HTTP"));
  EXPECT_THAT(by([](Stranger* s, int fd) { s->Send(fd, kHead), s->SendOn(fd, "X-A: b\r\n"); }, is_long),
              HasSubstr("a head of more than"));
  EXPECT_EQ(Failed("answer"), 2);
  EXPECT_THAT(by([](Stranger* s, int fd) { s->Hang(fd); }, is_short), HasSubstr("no answer"));
  EXPECT_THAT(by([](Stranger* s, int fd) { s->Send(fd, "HTTP/1.1 200 OK\r\n\r\n"), s->Hang(fd); }, is_short),
              HasSubstr("in the TLS handshake"));
  EXPECT_EQ(Failed("timeout"), 2);
}

TEST(SplitUrlTest, ProxyIsPlainHttpWithoutAPath) {
  EXPECT_EQ(SplitProxyUrl("http://proxy.corp:3128")->port, 3128);
  EXPECT_EQ(SplitProxyUrl("http://[::1]:3128/")->host, "::1");
  for (const char* bad : {"https://a:1", "http://a/b", "http://u:p@a:1", "a:1", "socks5://a:1"}) {
    EXPECT_EQ(SplitProxyUrl(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST_F(HttpPostTest, StalledOrBrokenTlsHandshakeIsGivenUp) {
  Stranger silent([](Stranger* self, int fd) { self->Hang(fd); });
  EXPECT_THAT(std::string(Post(silent.url("https")).message()), HasSubstr("in the TLS handshake"));
  Stranger drips([](Stranger* self, int fd) {  // The start of a record, and then a byte at a time.
    self->Send(fd, std::string("\x16\x03\x03\x40\0\x02\0\x3f\xfc", 9));
    self->SendOn(fd, std::string(1, '\0'), milliseconds(20));
  });
  EXPECT_THAT(std::string(Post(drips.url("https")).message()), HasSubstr("in the TLS handshake"));
  EXPECT_EQ(Failed("timeout"), 2);
  Stranger plain([](Stranger* self, int fd) { self->Send(fd, "HTTP/1.1 200 OK\r\n\r\n"), self->Hang(fd); });
  EXPECT_FALSE(Post(plain.url("https"), {.timeout_ns = kLongNs}).ok());
  EXPECT_GE(Failed("tls"), 1);
}

TEST(SplitUrlTest, OnlyLegalUrlsAreSplit) {
  EXPECT_EQ(SplitUrl("http://a:1/b/c?d")->origin, "http://a:1");
  EXPECT_EQ(SplitUrl("http://a:1/b/c?d")->path, "/b/c?d");
  EXPECT_EQ(SplitUrl("https://a")->path, "/");
  EXPECT_EQ(SplitUrl("https://a")->port, 443);
  EXPECT_EQ(SplitUrl("http://a_b.c-d")->port, 80);
  EXPECT_EQ(SplitUrl("http://[::1]:65535/x")->host, "::1");
  EXPECT_EQ(SplitUrl("http://[::1]:65535/x")->port, 65535);
  EXPECT_EQ(SplitUrl("http://a?b")->path, "/?b");
  for (const char* bad : {"",
                          "a/b",
                          "ftp://a/b",
                          "file:///etc/passwd",
                          "http://",
                          "http:///x",
                          "http://a b/",
                          "http://user:secret@a/",
                          "http://a:0/",
                          "http://a:65536/",
                          "http://a:99999999999999999999/",
                          "http://a:/",
                          "http://a:1x/",
                          "http://a:-1/",
                          "http://a:0x50/",
                          "http://[::1/",
                          "http://[::1]x/",
                          "http://[]/",
                          "http://a\x01/",
                          "http://a/#b",
                          "http://a\r\nb/"}) {
    EXPECT_EQ(SplitUrl(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  EXPECT_THAT(std::string(SplitUrl("http://user:secret@a/").status().message()), ::testing::Not(HasSubstr("secret")));
}

}  // namespace
}  // namespace bellwether::server
