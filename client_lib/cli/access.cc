// cert, token: what a server with TLS and identities needs; bellwetherd makes it.
#include <string>
#include <vector>

#include "cli/cli.h"

namespace bellwether::cli {
namespace {

struct AccessOptions {
  std::string folder, name, uri, out, file, id, expires, days;
  std::vector<std::string> hosts;
  bool replace = false;
};

class Words {
 public:
  explicit Words(std::vector<std::string> words) : words_(std::move(words)) {}
  Words& Flag(const char* flag, bool set) {
    if (set) words_.emplace_back(flag);
    return *this;
  }
  Words& Option(const char* flag, const std::string& value) {
    if (!value.empty()) words_.insert(words_.end(), {flag, value});
    return *this;
  }
  // What stands behind -- is no flag, whatever it begins with.
  ExitCode Run(const std::vector<std::string>& arguments) {
    words_.emplace_back("--");
    words_.insert(words_.end(), arguments.begin(), arguments.end());
    Execute(words_);
    return kFailed;
  }

 private:
  std::vector<std::string> words_;
};

ExitCode CertInit(Cli*, const AccessOptions& options) {
  Words words({"cert", "init"});
  for (const std::string& host : options.hosts) words.Option("--host", host);
  return words.Option("--days", options.days).Run({options.folder});
}

ExitCode CertServer(Cli*, const AccessOptions& options) {
  Words words({"cert", "server"});
  for (const std::string& host : options.hosts) words.Option("--host", host);
  return words.Option("--days", options.days).Run({options.folder});
}

ExitCode CertClient(Cli*, const AccessOptions& options) {
  return Words({"cert", "client"})
      .Option("--uri", options.uri)
      .Option("--out", options.out)
      .Flag("--replace", options.replace)
      .Option("--days", options.days)
      .Run({options.folder, options.name});
}

ExitCode CertRevoke(Cli*, const AccessOptions& options) {
  std::vector<std::string> arguments = {options.folder};
  if (!options.file.empty()) arguments.push_back(options.file);
  return Words({"cert", "revoke"}).Run(arguments);
}

ExitCode CertShow(Cli*, const AccessOptions& options) { return Words({"cert", "show"}).Run({options.file}); }

ExitCode TokenCreate(Cli*, const AccessOptions& options) {
  return Words({"token", "create"})
      .Option("--file", options.file)
      .Option("--expires", options.expires)
      .Option("--out", options.out)
      .Run({options.name});
}

ExitCode TokenList(Cli*, const AccessOptions& options) {
  return Words({"token", "list"}).Option("--file", options.file).Run({});
}

ExitCode TokenRevoke(Cli*, const AccessOptions& options) {
  return Words({"token", "revoke"}).Option("--file", options.file).Run({options.id});
}

void AddDays(CLI::App* command, AccessOptions* options) {
  command->add_option("--days", options->days, "how long it counts [365]");
}

void AddHosts(CLI::App* command, AccessOptions* options) {
  command
      ->add_option("--host", options->hosts,
                   "a name or address of the server, beside this machine's own; may be repeated")
      ->allow_extra_args(false);
}

void AddFile(CLI::App* command, AccessOptions* options) {
  command->add_option("--file", options->file, "the server's tokens_file")->required();
}

void AddCert(Cli* cli) {
  CLI::App* const noun = AddNoun(cli, "cert", "Certificates of an authority of your own, for TLS");
  CLI::App* command = nullptr;
  auto* options =
      AddCommand<AccessOptions>(cli, noun, "init", "Makes an authority and a server's certificate in a folder",
                                "bellwether cert init tls --host bellwether.example.org", &CertInit, &command);
  command->add_option("folder", options->folder, "where to: ca.pem, ca.key, server.pem, server.key, crl.pem")
      ->required();
  AddHosts(command, options);
  AddDays(command, options);
  options = AddCommand<AccessOptions>(
      cli, noun, "server",
      "Makes the server's certificate anew, with the names that it had; a running server takes it up",
      "bellwether cert server tls", &CertServer, &command);
  command->add_option("folder", options->folder, "where ca.pem and ca.key are")->required();
  AddHosts(command, options);
  AddDays(command, options);
  options = AddCommand<AccessOptions>(cli, noun, "client", "Makes a client's certificate",
                                      "bellwether cert client tls trainers", &CertClient, &command);
  command->add_option("folder", options->folder, "where ca.pem and ca.key are")->required();
  command->add_option("name", options->name, "its files' name, and the end of its URI")->required();
  command->add_option("--uri", options->uri,
                      "the name by which access_file knows it [spiffe://bellwether/client/NAME]");
  command->add_option("--out", options->out, "another folder for the files");
  command->add_flag("--replace", options->replace, "in the place of the files that are there, as to renew them");
  AddDays(command, options);
  options =
      AddCommand<AccessOptions>(cli, noun, "revoke", "Takes a client's certificate back; a running server refuses it",
                                "bellwether cert revoke tls tls/trainers.pem", &CertRevoke, &command);
  command->add_option("folder", options->folder, "where ca.pem and ca.key are, and crl.pem is written")->required();
  command->add_option("certificate", options->file, "its PEM; without it crl.pem is written anew, as it was or empty")
      ->check(CLI::ExistingFile);
  options = AddCommand<AccessOptions>(cli, noun, "show", "Says whose a certificate is and how long it counts",
                                      "bellwether cert show tls/server.pem", &CertShow, &command);
  command->add_option("file", options->file, "the PEM")->required()->check(CLI::ExistingFile);
}

void AddToken(Cli* cli) {
  CLI::App* const noun = AddNoun(cli, "token", "Tokens of a server's identities");
  CLI::App* command = nullptr;
  auto* options =
      AddCommand<AccessOptions>(cli, noun, "create", "Makes a token and prints it once; only its hash is kept",
                                "bellwether token create alice --file tokens --expires 90d", &TokenCreate, &command);
  command->add_option("identity", options->name, "whose, as access_file names it")->required();
  AddFile(command, options);
  command->add_option("--expires", options->expires, "when: 12h, 90d, never [never]");
  command->add_option("--out", options->out, "write it to this file, mode 0600, instead of printing it");
  options = AddCommand<AccessOptions>(cli, noun, "list", "Lists whose tokens there are",
                                      "bellwether token list --file tokens", &TokenList, &command);
  AddFile(command, options);
  options = AddCommand<AccessOptions>(cli, noun, "revoke", "Takes a token back; a running server ends its streams",
                                      "bellwether token revoke 3f9a01c2d4e5 --file tokens", &TokenRevoke, &command);
  command->add_option("id", options->id, "as token list shows it")->required();
  AddFile(command, options);
}

}  // namespace

void AddAccess(Cli* cli) {
  AddCert(cli);
  AddToken(cli);
}

}  // namespace bellwether::cli
