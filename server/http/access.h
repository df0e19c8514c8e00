// access.h: what guards a browser.
//
// access/access.h finds the caller's identity.  Every page except /-/healthy is
// shown a certificate, a bearer token, or the cookie that the page gets.  Or
// ?token= stands once in the address, which sets the cookie and leads to the
// same address without it.
//
// If no caller is asked for an identity, every program that reaches the port
// may read.  Two things then guard a browser on the same machine.  The Host
// header must name this server: another site cannot point its own name at
// loopback.  A call that changes something needs the content type
// application/json: another site's form cannot send it.

#ifndef BELLWETHER_SERVER_HTTP_ACCESS_H_
#define BELLWETHER_SERVER_HTTP_ACCESS_H_

#include <string>
#include <string_view>
#include <vector>

namespace bellwether::server {

// The value of the cookie in a Cookie header, "" if it is not there.
std::string_view CookieValue(std::string_view header, std::string_view name);

// True if a Host header ("name", "name:port", "[::1]:port") names a loopback
// address, a literal address, or one of `allowed`; "*" allows every name.
bool HostIsAllowed(std::string_view host, const std::vector<std::string>& allowed);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_HTTP_ACCESS_H_
