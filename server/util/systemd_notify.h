// systemd_notify.h: reports to the service manager how far the process is.
//
// systemd's protocol is one datagram to the socket that it names in
// $NOTIFY_SOCKET, a path or, after an '@', an abstract name.  sd_notify(3)
// lists the messages.  These few lines spare the server libsystemd.

#ifndef BELLWETHER_SERVER_UTIL_SYSTEMD_NOTIFY_H_
#define BELLWETHER_SERVER_UTIL_SYSTEMD_NOTIFY_H_

#include <string>

namespace bellwether::server {

// Sends `state` ("READY=1"; several, one a line) and returns whether it was
// sent.  False without a manager that wants to know, and if the socket refuses:
// no program waits for the message then.  Waits while the socket is full, as a
// lost READY=1 would end the service.  Thread-safe.
bool NotifySystemd(const std::string& state);

// "RELOADING=1" with the time on the monotonic clock, which Type=notify-reload
// wants (systemd 253); what follows must be "READY=1".
std::string ReloadingState();

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_UTIL_SYSTEMD_NOTIFY_H_
