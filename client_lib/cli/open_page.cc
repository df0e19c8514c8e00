// open [RUN]: the page of a run, also after its job and its private server.
//
// As `python -m bellwether open`, which needs no gRPC.
#include "cli/open_page.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "cli/cli.h"
#include "cli/private_server.h"
#include "cli/trouble.h"

namespace bellwether::cli {
namespace {

struct OpenOptions {
  std::string run;
  bool print = false, own = false;
};

bool HasDesktop() {
  for (const char* const name : {"DISPLAY", "WAYLAND_DISPLAY"}) {
    if (const char* const value = std::getenv(name); value != nullptr && *value != '\0') return true;
  }
  return false;
}

// The programs that $BROWSER names, each with the address put in, then the desktop's own.
std::vector<std::vector<std::string>> Browsers(const std::string& url) {
  std::vector<std::vector<std::string>> browsers;
  const char* const named = std::getenv("BROWSER");
  std::string rest = named == nullptr ? "" : named;
  while (!rest.empty()) {
    const std::string one = rest.substr(0, rest.find(':'));
    rest.erase(0, one.size() + 1);
    std::vector<std::string> words;
    bool placed = false;
    for (size_t begin = 0; begin < one.size();) {
      const size_t end = std::min(one.find(' ', begin), one.size());
      if (end > begin) words.push_back(one.substr(begin, end - begin));
      begin = end + 1;
    }
    for (std::string& word : words) {
      if (const size_t at = word.find("%s"); at != std::string::npos) {
        word.replace(at, 2, url);
        placed = true;
      }
    }
    if (words.empty()) continue;
    if (!placed) words.push_back(url);
    browsers.push_back(std::move(words));
  }
  browsers.push_back({"xdg-open", url});
  return browsers;
}

// Leaves a browser behind that this command does not wait for, with nothing of its output.
void Show(const std::string& url) {
  std::cout.flush();
  const pid_t child = fork();
  if (child < 0) return;
  if (child > 0) {
    waitpid(child, nullptr, 0);
    return;
  }
  if (setsid() < 0 || fork() != 0) _exit(0);
  const int null = open("/dev/null", O_RDWR);
  for (int fd = 0; fd < 3; ++fd) dup2(null, fd);
  for (std::vector<std::string>& words : Browsers(url)) {
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    execvp(argv[0], argv.data());
  }
  _exit(127);
}

std::string Escaped(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) != 0 || std::string("-_.~").find(c) != std::string::npos) {
      escaped += c;
      continue;
    }
    char code[4];
    std::snprintf(code, sizeof code, "%%%02X", byte);
    escaped += code;
  }
  return escaped;
}

ExitCode Open(Cli* cli, const OpenOptions& options) {
  ExitCode code = kOk;
  std::string why;
  std::unique_ptr<Connection> connection;
  if (!options.own) connection = TryConnect(cli->connect, &code, &why);
  if (options.own || (code == kUnreachable && cli->connect.server.empty())) {
    const bool there = !FindPrivateServer().grpc.empty();
    const PrivateServer server = JoinOrStartPrivateServer(&why);
    if (server.grpc.empty()) {
      Complain(why);
      return kFailed;
    }
    if (!there) Complain("your private server is started over " + server.data + "; it ends by itself when idle");
    connection = ConnectTo(server, cli->connect);
  }
  if (connection == nullptr) {
    Complain(why);
    return code;
  }
  std::string name;
  if (!options.run.empty()) {
    v1::GetRunRequest request;
    request.set_run(options.run);
    v1::Run run;
    grpc::Status status;
    do {
      grpc::ClientContext context;
      connection->Prepare(&context);
      status = connection->stub().GetRun(&context, request, &run);
    } while (!status.ok() && CompleteRunNames(connection.get(), status, &request));
    if (!status.ok()) return Report(connection.get(), status);
    name = run.description().name();
  }
  grpc::Status status;
  const std::string page = PageOf(connection.get(), &status);
  if (!status.ok()) return Report(connection.get(), status);
  if (page.empty()) {
    Complain(connection->address() + " serves no page (its --web.listen-address is none)");
    return kFailed;
  }
  const std::string& token = connection->page_token();
  const std::string url = PageAddress(page + (token.empty() ? "" : "?token=" + token), name);
  std::cout << url << '\n';
  if (!options.print && HasDesktop()) Show(url);
  return kOk;
}

}  // namespace

std::string PageOf(Connection* connection, grpc::Status* status) {
  if (!connection->page().empty()) return connection->page() + "/";
  v1::ServerInfo info;
  grpc::ClientContext context;
  connection->Prepare(&context);
  *status = connection->stub().GetServerInfo(&context, v1::GetServerInfoRequest(), &info);
  if (!status->ok()) return "";
  const auto option = [&info](const char* name) {
    const auto found = info.options().find(name);
    return found == info.options().end() ? std::string() : found->second;
  };
  std::string page = option("web.external_url");
  if (page.empty()) {
    std::string at = info.http_address();
    if (at.empty()) return "";
    const std::string& server = connection->address();
    for (const std::string every : {"0.0.0.0:", "[::]:", ":::"}) {  // By the name that is known here.
      if (at.rfind(every, 0) == 0 && server.rfind("unix:", 0) != 0) {
        at = server.substr(0, server.rfind(':') + 1) + at.substr(every.size());
      }
    }
    page = (!option("tls.cert_file").empty() && option("web.tls") != "false" ? "https://" : "http://") + at;
  }
  return page.back() == '/' ? page : page + "/";
}

std::string PageAddress(const std::string& page, const std::string& run) {
  return run.empty() ? page : page + "#/run/" + Escaped(run);
}

void AddOpen(Cli* cli) {
  CLI::App* command = nullptr;
  auto* const options = AddCommand<OpenOptions>(
      cli, &cli->app, "open",
      "Prints the address of a run's page, or of all runs, and opens it on a desktop by $BROWSER or xdg-open",
      "bellwether open my-run --print", &Open, &command);
  command->add_option("run", options->run, "the run's name, or its uuid in hexadecimal; else all runs")
      ->type_name("RUN");
  command->add_flag("--print", options->print, "do not open a browser");
  command->add_flag("--private", options->own,
                    "the page of your private server, started over its runs, even where another server answers");
}

}  // namespace bellwether::cli
