#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace tessera::cli {

struct HttpAnswer {
  int status = 404;
  std::string type = "text/plain", body = "not found\n";
};

// A web server for a browser on this machine. It listens at 127.0.0.1 only, answers GET only, one request at a time,
// and refuses requests whose Host is another name, so that pages of other sites cannot read it (DNS rebinding).
// Example:  LoopbackServer server(0);
//           std::cout << server.address();
//           server.run([](std::string_view path) { return HttpAnswer{200, "text/html", page()}; });
class LoopbackServer {
 public:
  // `port` 0: a free one. Throws SystemError, or UsageError if the port is in use.
  explicit LoopbackServer(int64_t port);
  ~LoopbackServer();
  LoopbackServer(const LoopbackServer&) = delete;

  int64_t port() const { return port_; }
  std::string address() const;  // "http://127.0.0.1:8123/"
  using Handler = std::function<HttpAnswer(std::string_view path)>;
  void run(const Handler& handler);  // returns after stop()
  void stop();                       // from any thread

 private:
  void answer(int connection, const Handler& handler) const;
  int socket_ = -1, stop_ = -1;
  int64_t port_ = 0;
};

}  // namespace tessera::cli
