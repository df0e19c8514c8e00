#include "cli/trouble.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string_view>
#include <vector>

#include "bellwether/signal_table.h"
#include "cli/nearest.h"
#include "cli/private_server.h"

namespace bellwether::cli {
namespace {

using namespace std::chrono_literals;
using std::string_view_literals::operator""sv;

constexpr auto kPatience = 1s;  // Of one question.
constexpr size_t kAnswerBytesMax = 1 << 20;
constexpr uint32_t kRunsAsked = 1000;

bool Has(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

// "host:port" apart; false: it is neither that nor [host]:port.
bool Part(const std::string& address, std::string* host, std::string* port) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0) return false;
  *host = address.substr(0, colon);
  *port = address.substr(colon + 1);
  if (host->size() > 2 && host->front() == '[' && host->back() == ']') *host = host->substr(1, host->size() - 2);
  return true;
}

// A connection that waits no longer than kPatience for anything.
class Socket {
 public:
  explicit Socket(const std::string& address) {
    if (address.rfind("unix:", 0) == 0) {
      sockaddr_un local{.sun_family = AF_UNIX};
      const std::string path = address.substr(sizeof("unix:") - 1);
      if (path.size() >= sizeof local.sun_path) return;
      std::memcpy(local.sun_path, path.data(), path.size());
      Reach(AF_UNIX, reinterpret_cast<const sockaddr*>(&local), sizeof local);
      return;
    }
    std::string host, port;
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    if (!Part(address, &host, &port) || getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return;
    for (const addrinfo* at = found; at != nullptr && fd_ < 0; at = at->ai_next) {
      Reach(at->ai_family, at->ai_addr, at->ai_addrlen);
    }
    freeaddrinfo(found);
  }
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  bool reached() const { return fd_ >= 0; }

  // What comes after `question`, until the other side has ended it or `enough` says so.
  template <typename Enough>
  std::string Ask(std::string_view question, const Enough& enough) {
    std::string answer;
    if (send(fd_, question.data(), question.size(), MSG_NOSIGNAL) < 0) return answer;
    const auto end = std::chrono::steady_clock::now() + kPatience;
    char part[4096];
    while (answer.size() < kAnswerBytesMax && !enough(answer) && Await(POLLIN, end)) {
      const ssize_t got = recv(fd_, part, sizeof part, 0);
      if (got <= 0) break;
      answer.append(part, static_cast<size_t>(got));
    }
    return answer;
  }

 private:
  bool Await(short what, std::chrono::steady_clock::time_point end) const {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    pollfd wait{.fd = fd_, .events = what};
    return left.count() > 0 && poll(&wait, 1, static_cast<int>(left.count())) > 0;
  }

  void Reach(int family, const sockaddr* to, socklen_t size) {
    fd_ = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd_ < 0) return;
    int error = connect(fd_, to, size) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      socklen_t length = sizeof error;
      const bool done = Await(POLLOUT, std::chrono::steady_clock::now() + kPatience);
      if (!done || getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = ETIMEDOUT;
    }
    if (error == 0) return;
    close(fd_);
    fd_ = -1;
  }

  int fd_ = -1;
};

enum class Speaks { kNothing, kUnknown, kPage, kGrpc, kTls, kGrpcOverTls };

// A ClientHello of TLS 1.2 that offers h2, which is what gRPC's port takes.
constexpr std::string_view kHello =
    "\x16\x03\x01\x00\x4e\x01\x00\x00\x4a\x03\x03"
    "bellwether asks what is here... "  // 32 bytes that TLS wants at random; no secret depends on them.
    "\x00\x00\x04\xc0\x2b\xc0\x2f\x01\x00"
    "\x00\x1d"                                          // Extensions:
    "\x00\x0a\x00\x04\x00\x02\x00\x17"                  // the curve P-256,
    "\x00\x0d\x00\x08\x00\x06\x04\x03\x08\x04\x04\x01"  // signatures by ECDSA and RSA,
    "\x00\x10\x00\x05\x00\x03\x02h2"sv;                 // the protocol.

struct Found {
  Speaks what = Speaks::kNothing;
  std::string grpc;  // Where the page's server speaks gRPC, if it says so.
};

// What is at the address, asked without gRPC.
Found AskWhatSpeaks(const std::string& address) {
  Found found;
  Socket plain(address);
  if (!plain.reached()) return found;
  const std::string question = "POST /api/v1/GetServerInfo HTTP/1.1\r\nHost: " + address +
                               "\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}";
  const std::string answer =
      plain.Ask(question, [](const std::string& text) { return text.size() > 9 && text.rfind("HTTP/", 0) != 0; });
  if (answer.rfind("HTTP/1", 0) == 0 && !Has(answer, "HTTP request to an HTTPS")) {
    found.what = Speaks::kPage;
    constexpr std::string_view kField = "\"grpc_address\":\"";
    if (const size_t at = answer.find(kField); at != std::string::npos) {
      const size_t begin = at + kField.size();
      found.grpc = answer.substr(begin, answer.find('"', begin) - begin);
    }
    return found;
  }
  if (answer.size() > 9 && answer[3] == 4) {  // SETTINGS, with which an HTTP/2 server begins.
    found.what = Speaks::kGrpc;
    return found;
  }
  Socket again(address);
  found.what = Speaks::kUnknown;
  if (!again.reached()) return found;
  const std::string hello = again.Ask(kHello, [](const std::string& text) { return Has(text, "\x02h2"); });
  if (!hello.empty() && hello[0] == 0x16) found.what = Has(hello, "\x02h2") ? Speaks::kGrpcOverTls : Speaks::kTls;
  return found;
}

std::string PagesPort(const std::string& address, const std::string& grpc) {
  std::string port = grpc.rfind("unix:", 0) == 0 ? grpc : grpc.substr(grpc.rfind(':') + 1);
  if (port.empty()) port = PrivateGrpcOf(address);
  return "that is the port of the page, or of another program; " +
         (port.empty() ? "gRPC's is 7070 if nothing else is configured" : "gRPC's is " + port);
}

std::string Quoted(const std::string& text, const std::string& before) {
  const size_t at = text.find(before + " \"");
  if (at == std::string::npos) return "";
  const size_t begin = at + before.size() + 2;
  const size_t end = text.find('"', begin);
  return end == std::string::npos ? "" : text.substr(begin, end - begin);
}

constexpr char kNoSuchRun[] = "no run has this name or uuid";

std::vector<std::string> RunNames(Connection* connection, const std::string& holding = "") {
  v1::ListRunsRequest request;
  request.set_limit(kRunsAsked);
  request.set_name_contains(holding);
  v1::ListRunsResponse response;
  grpc::ClientContext context;
  connection->Prepare(&context);
  std::vector<std::string> names;
  if (!connection->stub().ListRuns(&context, request, &response).ok()) return names;
  for (const v1::Run& run : response.runs()) names.push_back(run.description().name());
  return names;
}

}  // namespace

std::string WhyNoAddress(const std::string& address) {
  if (address.rfind("unix:", 0) == 0) return address.size() > 5 ? "" : "must be unix:PATH";
  const std::string must = "must be host:port, such as 127.0.0.1:7070, or unix:PATH";
  if (Has(address, "://") && address.rfind("dns:", 0) != 0) return must + ", not the address of a page";
  std::string host, port;
  const bool parted = Part(address, &host, &port) && !host.empty();
  const bool number = !port.empty() && port.size() < 6 &&
                      std::all_of(port.begin(), port.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
  return parted && number && std::stoi(port) > 0 && std::stoi(port) < 65536 ? "" : must;
}

std::string WhyUnreachable(const Connection& connection, const grpc::Status& status) {
  const std::string& said = status.error_message();
  const bool late = status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
  const ConnectOptions& options = connection.options();
  const bool tls = !options.tls_ca.empty() || !options.tls_cert.empty();
  const std::string cannot = "cannot reach " + connection.address() + ": ";
  const std::string nothing = cannot + "nothing listens there; is bellwetherd running?";
  if (Has(said, "DNS resolution failed")) return cannot + "no address is known for this name";
  if (Has(said, "Connection refused") || Has(said, "No such file or directory")) return nothing;
  if (Has(said, "certificate verify failed") || Has(said, "CERTIFICATE_VERIFY_FAILED")) {
    return cannot + "its certificate is of no authority in " +
           (options.tls_ca.empty() ? "the system's list: give --tls-ca" : "--tls-ca " + options.tls_ca) +
           ", or it has expired";
  }
  if (Has(said, "not in peer certificate") || Has(said, "ostname")) {
    return cannot + "its certificate is of another name; give --server as the certificate names it (" + said + ")";
  }
  const Found found = AskWhatSpeaks(connection.address());
  switch (found.what) {
    case Speaks::kNothing:
      return nothing;
    case Speaks::kPage:
      return cannot + PagesPort(connection.address(), found.grpc);
    case Speaks::kTls:
      return cannot + "it speaks TLS, and no gRPC: " + PagesPort(connection.address(), "");
    case Speaks::kGrpcOverTls:
      if (late) break;
      if (options.tls_ca.empty() && !tls) return cannot + "it speaks TLS: give --tls-ca, the file of its authority";
      if (options.tls_cert.empty()) return cannot + "it wants a client's certificate: give --tls-cert and --tls-key";
      return cannot + "it refuses the certificate of --tls-cert: of another authority, expired, or taken back";
    case Speaks::kGrpc:
      if (tls) return cannot + "it speaks no TLS: leave out --tls-ca, --tls-cert and --tls-key";
      break;
    case Speaks::kUnknown:
      if (late) {
        return "no answer from " + connection.address() + " in time: something listens there and says nothing; " +
               "is it bellwetherd? (see --timeout)";
      }
      break;
  }
  if (late) {
    return "no answer from " + connection.address() + " in time: the server is there, and busy or far (see --timeout)";
  }
  return cannot + said;
}

std::string Suggestion(Connection* connection, const grpc::Status& status) {
  const std::string& said = status.error_message();
  if (status.error_code() == grpc::StatusCode::NOT_FOUND && Has(said, kNoSuchRun)) {
    const std::vector<std::string> names = RunNames(connection);
    const std::string nearest = DidYouMean(Quoted(said, "run"), names);
    if (!nearest.empty()) return nearest;
    const std::string earlier = connection->is_private() ? "" : EarlierRuns("bellwether open --private");
    return (names.empty() ? "; there is no run at all" : " (see bellwether run list)") +
           (earlier.empty() ? "" : "; " + earlier);
  }
  if (status.error_code() == grpc::StatusCode::NOT_FOUND && Has(said, "has no such action")) {
    return " (see bellwether action list RUN)";
  }
  if (status.error_code() == grpc::StatusCode::INVALID_ARGUMENT && Has(said, "of the signal catalogue")) {
    std::vector<std::string> names;
    for (size_t i = 0; i < SignalCount(); ++i) names.emplace_back(SignalTable()[i].name);
    return DidYouMean(Quoted(said, "signal"), names);
  }
  return "";
}

bool CompleteRunNames(Connection* connection, const grpc::Status& status, google::protobuf::Message* request) {
  const std::string& kind = request->GetDescriptor()->name();
  const auto begins = [&kind](const char* word) { return kind.rfind(word, 0) == 0; };
  if (!ForPeople() || !(begins("Get") || begins("List") || begins("Top") || begins("Compare"))) return false;
  const std::string word = Quoted(status.error_message(), "run");
  if (status.error_code() != grpc::StatusCode::NOT_FOUND || !Has(status.error_message(), kNoSuchRun) || word.empty()) {
    return false;
  }
  std::vector<std::string> names = RunNames(connection, word);
  std::erase_if(names, [&word](const std::string& name) { return name.rfind(word, 0) != 0; });
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  if (names.size() != 1) return false;
  bool changed = false;
  for (const char* const field : {"run", "baseline"}) {
    const auto* const at = request->GetDescriptor()->FindFieldByName(field);
    if (at == nullptr || at->cpp_type() != google::protobuf::FieldDescriptor::CPPTYPE_STRING) continue;
    if (request->GetReflection()->GetString(*request, at) != word) continue;
    request->GetReflection()->SetString(request, at, names[0]);
    changed = true;
  }
  if (changed) Complain("\"" + word + "\" is taken as " + names[0] + ", the only run that begins so");
  return changed;
}

}  // namespace bellwether::cli
