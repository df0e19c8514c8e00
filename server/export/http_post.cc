#include "server/export/http_post.h"

#include <algorithm>
#include <charconv>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/export/http_exchange.h"
#include "server/util/clean_text.h"
#include "server/util/clock.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// A port, decimal, of 1 to 65535; 0: it is none.
int PortOf(std::string_view text) {
  int port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  return error == std::errc() && end == text.data() + text.size() && port >= 1 && port <= 65535 ? port : 0;
}

bool IsHostCharacter(char c) { return absl::ascii_isalnum(c) || c == '.' || c == '-' || c == '_'; }

// Splits host[:port] or [address][:port]; false: it is neither.
bool SplitAuthority(std::string_view authority, UrlParts* parts) {
  size_t end = 0;
  if (authority.starts_with('[')) {
    end = authority.find(']');
    if (end == std::string_view::npos) return false;
    parts->host = authority.substr(1, end - 1);
    if (parts->host.empty() || parts->host.find_first_not_of("0123456789abcdefABCDEF:.") != std::string::npos)
      return false;
    ++end;
  } else {
    end = std::min(authority.find(':'), authority.size());
    parts->host = authority.substr(0, end);
    if (parts->host.empty() || !std::all_of(parts->host.begin(), parts->host.end(), IsHostCharacter)) return false;
  }
  parts->port = parts->tls ? 443 : 80;
  if (end == authority.size()) return true;
  parts->port = authority[end] == ':' ? PortOf(authority.substr(end + 1)) : 0;
  return parts->port != 0;
}

// A proxy without a tunnel is told the whole address.
std::string RequestOf(const UrlParts& url, bool to_proxy, const std::string& body) {
  std::string path = to_proxy ? url.origin : std::string();
  for (const char c : url.path) {
    const auto byte = static_cast<unsigned char>(c);
    byte < 0x80 ? absl::StrAppend(&path, std::string(1, c)) : absl::StrAppend(&path, absl::StrFormat("%%%02X", byte));
  }
  return absl::StrCat("POST ", path, " HTTP/1.1\r\nHost: ", url.origin.substr(url.origin.find("://") + 3),
                      "\r\nUser-Agent: bellwetherd\r\nAccept: */*\r\nAccept-Encoding: identity\r\n"
                      "Content-Type: application/json\r\nContent-Length: ",
                      body.size(), "\r\nConnection: close\r\n\r\n", body);
}

// What an attempt came to; an empty cause: the receiver has it.
struct Verdict {
  const char* cause = "";
  std::string text;
};

Verdict Judge(const HttpAnswer& answer, size_t shown_bytes_max) {
  if (answer.status >= 200 && answer.status < 300) return {};
  // What a receiver says of a bad request is what one needs to mend it.
  std::string text = absl::StrCat("answered ", answer.status);
  if (answer.status >= 300 && answer.status < 400) {
    absl::StrAppend(&text, ", a redirect, which is not followed");
    if (!answer.location.empty()) absl::StrAppend(&text, ": ", CleanText(answer.location, shown_bytes_max));
    return {"redirect", text};
  }
  if (!answer.text.empty()) absl::StrAppend(&text, " ", CleanText(answer.text, shown_bytes_max));
  return {"status", text};
}

}  // namespace

absl::StatusOr<UrlParts> SplitUrl(const std::string& url) {
  UrlParts parts;
  parts.tls = absl::StartsWith(url, "https://");
  const bool known = parts.tls || absl::StartsWith(url, "http://");
  const bool printable = std::none_of(
      url.begin(), url.end(), [](char c) { return absl::ascii_isspace(c) || absl::ascii_iscntrl(c) || c == '#'; });
  const size_t host = known ? url.find("://") + 3 : 0;
  const size_t path = std::min(url.find_first_of("/?", host), url.size());
  const std::string authority = url.substr(host, path - host);
  if (known && absl::StrContains(authority, '@')) {
    return absl::InvalidArgumentError("an address must hold no user and password");
  }
  if (!known || !printable || !SplitAuthority(authority, &parts)) {
    return absl::InvalidArgumentError(absl::StrCat("\"", CleanText(url, 200),
                                                   "\": must be http://host[:port]/path or https://..., the port of 1 "
                                                   "to 65535, without spaces and #"));
  }
  parts.origin = url.substr(0, path);
  const std::string rest = url.substr(path);
  parts.path = absl::StartsWith(rest, "/") ? rest : absl::StrCat("/", rest);
  return parts;
}

absl::StatusOr<UrlParts> SplitProxyUrl(const std::string& url) {
  BW_ASSIGN_OR_RETURN(UrlParts parts, SplitUrl(url));
  if (parts.tls || parts.path != "/") {
    return absl::InvalidArgumentError(absl::StrCat("\"", CleanText(url, 200), "\": must be http://host[:port]"));
  }
  return parts;
}

HttpPoster::HttpPoster(UrlParts url, UrlParts proxy, const HttpPostLimits& limits, const std::string& channel,
                       Counters* counters)
    : url_(std::move(url)),
      proxy_(std::move(proxy)),
      limits_(limits),
      channel_(channel),
      counters_(counters),
      cut_(counters->counter("bellwether_notification_answers_cut_total", {{"channel", channel}})),
      wake_fd_(NewEventFd()) {}

HttpPoster::~HttpPoster() { CloseEventFd(wake_fd_); }

void HttpPoster::EndBy(int64_t monotonic_ns) {
  end_ns_ = monotonic_ns;
  SignalEventFd(wake_fd_);
}

absl::Status HttpPoster::Post(const std::string& body) {
  Patience patience(Clock::System()->MonotonicNanos() + limits_.timeout_ns, &end_ns_, wake_fd_);
  const bool proxied = !proxy_.host.empty();
  HttpExchange exchange(url_, proxy_, limits_, &patience);
  absl::StatusOr<HttpAnswer> answer = exchange.Run(RequestOf(url_, proxied && !url_.tls, body), &lookup_);
  Verdict verdict;
  if (answer.ok()) {
    if (answer->cut) cut_->Add();
    verdict = Judge(*answer, limits_.shown_bytes_max);
  } else {
    verdict = {exchange.cause(), CleanText(std::string(answer.status().message()), 2 * limits_.shown_bytes_max)};
  }
  if (*verdict.cause == '\0') return absl::OkStatus();
  counters_->counter("bellwether_notification_attempts_failed_total", {{"channel", channel_}, {"cause", verdict.cause}})
      ->Add();
  return absl::UnavailableError(
      absl::StrCat(url_.origin, proxied ? absl::StrCat(" by the proxy ", proxy_.origin) : "", ": ", verdict.text));
}

}  // namespace bellwether::server
