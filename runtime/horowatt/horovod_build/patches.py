# SPDX-License-Identifier: Apache-2.0
"""What has to change in Horovod's 0.28.1 sources so that they compile and run today.

Each patch replaces one exact piece of text. When that text is not there (another release, or a source
folder that somebody changed) nothing is built: a patch that silently does nothing would only be found
minutes later, as an error of the compiler.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from horowatt.errors import NeedsOperator


@dataclass(frozen=True, slots=True)
class Patch:
    """One replacement in one file of Horovod's source folder."""

    name: str
    reason: str
    """Why Horovod does not build or run without it."""
    file: str
    """Path inside the source folder."""
    old: str
    """Text that must be there, exactly once."""
    new: str


_PERFORM_HTTP = """\
// Perform http request to rendezvous server with retry logic
http::Response
HTTPStore::PerformHTTP(http::Request& request,
                       const std::string& method = HTTP_GET_METHOD,
                       const std::string& body = "") {
  for (int retry_cnt = 0; retry_cnt < MAX_RETRY_TIMES; ++retry_cnt) {
    try {
      http::Response response = request.send(method, body);
      if (response.status != HTTP_OK && response.status != HTTP_NOT_FOUND) {
"""

_PERFORM_HTTP_AUTHORIZED = """\
namespace {

// Not one of the errors that are worth another try.
class Refused : public std::runtime_error {
public:
  using std::runtime_error::runtime_error;
};

// Read at each request: a process may be given its job's token after it has started.
std::vector<std::string> TokenHeader() {
  const char* token = std::getenv("HOROWATT_RENDEZVOUS_TOKEN");
  if (token == nullptr || *token == '\\0') {
    return {};
  }
  return {std::string("X-Horowatt-Token: ") + token};
}

} // namespace

// Perform http request to rendezvous server with retry logic
http::Response
HTTPStore::PerformHTTP(http::Request& request,
                       const std::string& method = HTTP_GET_METHOD,
                       const std::string& body = "") {
  for (int retry_cnt = 0; retry_cnt < MAX_RETRY_TIMES; ++retry_cnt) {
    try {
      http::Response response = request.send(method, body, TokenHeader());
      if (response.status == http::Response::STATUS_FORBIDDEN) {
        const std::string message =
            "error[HW-RDV-003]: the job's rendezvous server at " + url_prefix_ +
            " refused this worker: HOROWATT_RENDEZVOUS_TOKEN is not the token of that job";
        LOG(ERROR) << message;
        throw Refused(message);
      }
      if (response.status != HTTP_OK && response.status != HTTP_NOT_FOUND) {
"""

_RETRY = """\
    } catch (std::exception& e) {
      LOG(DEBUG) << "Exception: " << e.what();
    }
"""

_GLOO_CONSTANTS = """\
constexpr size_t kMaxSendBufferSize = 32 * 1024 * 1024;
constexpr size_t kMaxRecvBufferSize = 32 * 1024 * 1024;
"""

_GLOO_PORT_RANGE = """
// First and last port to listen on, from HOROWATT_PORTS ("20000-20999"); 0 and 0 for any.
std::array<int, 2> listenPorts() {
  const char* text = getenv("HOROWATT_PORTS");
  if (text == nullptr || *text == '\\0') {
    return {0, 0};
  }
  int first = 0;
  int last = 0;
  char rest = 0;
  if (sscanf(text, "%d-%d%c", &first, &last, &rest) != 2 || first < 1 ||
      last > 65535 || first > last) {
    GLOO_THROW_INVALID_OPERATION_EXCEPTION(
        "error[HW-RDV-001]: HOROWATT_PORTS is no range of ports such as 20000-20999: ",
        text);
  }
  return {first, last};
}

// Each search goes on where the last one ended: a port rests as long as possible before it is used again,
// so that who still has the address of an ended world rarely reaches somebody else.
unsigned nextPort() {
  static std::atomic<unsigned> next{std::random_device{}()};
  return next++;
}

void setPort(struct sockaddr_storage& address, int port) {
  if (address.ss_family == AF_INET6) {
    reinterpret_cast<struct sockaddr_in6*>(&address)->sin6_port = htons(port);
  } else {
    reinterpret_cast<struct sockaddr_in*>(&address)->sin_port = htons(port);
  }
}
"""

_GLOO_LISTEN = """\
  const auto& attr = device_->attr_;
  auto fd = socket(attr.ai_family, attr.ai_socktype, attr.ai_protocol);
  if (fd == -1) {
    signalAndThrowException(GLOO_ERROR_MSG("socket: ", strerror(errno)));
  }

  // Set SO_REUSEADDR to signal that reuse of the listening port is OK.
  int on = 1;
  rv = setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (rv == -1) {
    ::close(fd);
    signalAndThrowException(GLOO_ERROR_MSG("setsockopt: ", strerror(errno)));
  }

  rv = bind(fd, (const sockaddr*)&attr.ai_addr, attr.ai_addrlen);
  if (rv == -1) {
    ::close(fd);
    signalAndThrowException(GLOO_ERROR_MSG("bind: ", strerror(errno)));
  }

  // listen(2) on socket
  fd_ = fd;
  rv = ::listen(fd_, 1024);
  if (rv == -1) {
    ::close(fd_);
    fd_ = FD_INVALID;
    signalAndThrowException(GLOO_ERROR_MSG("listen: ", strerror(errno)));
  }
"""

_GLOO_LISTEN_IN_RANGE = """\
  const auto& attr = device_->attr_;
  const auto ports = listenPorts();
  const unsigned count = ports[1] - ports[0] + 1;
  int fd;
  for (unsigned tried = 1;; tried++) {
    fd = socket(attr.ai_family, attr.ai_socktype, attr.ai_protocol);
    if (fd == -1) {
      signalAndThrowException(GLOO_ERROR_MSG("socket: ", strerror(errno)));
    }

    // Set SO_REUSEADDR to signal that reuse of the listening port is OK.
    int on = 1;
    rv = setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (rv == -1) {
      ::close(fd);
      signalAndThrowException(GLOO_ERROR_MSG("setsockopt: ", strerror(errno)));
    }

    auto address = attr.ai_addr;
    setPort(address, ports[0] + nextPort() % count);
    rv = bind(fd, (const sockaddr*)&address, attr.ai_addrlen);
    // Two that have bound one port at the same time are told apart here only.
    if (rv == 0) {
      rv = ::listen(fd, 1024);
    }
    if (rv == 0) {
      break;
    }
    const int error = errno;
    ::close(fd);
    if (error == EADDRINUSE && tried < count) {
      continue;
    }
    if (error == EADDRINUSE && ports[0] != 0) {
      signalAndThrowException(GLOO_ERROR_MSG(
          "error[HW-RDV-002]: none of the ports ", ports[0], " to ", ports[1],
          " of HOROWATT_PORTS is free"));
    }
    signalAndThrowException(GLOO_ERROR_MSG("bind or listen: ", strerror(error)));
  }
  fd_ = fd;
"""

PATCHES: tuple[Patch, ...] = (
    Patch(
        name="cxx17-core",
        reason="the headers of torch >= 2.1 refuse to compile below C++17",
        file="CMakeLists.txt",
        old="set(CMAKE_CXX_STANDARD 14)",
        new="set(CMAKE_CXX_STANDARD 17)",
    ),
    Patch(
        name="cxx17-torch",
        reason="the torch extension sets its own standard, below the one of the project",
        file="horovod/torch/CMakeLists.txt",
        old="set(CMAKE_CXX_STANDARD 14)",
        new="set(CMAKE_CXX_STANDARD 17)",
    ),
    Patch(
        name="gcc13-stdexcept",
        reason="std::logic_error is used, and since gcc 13 no other header brings its declaration",
        file="horovod/common/common.h",
        old="#include <memory>\n#include <string>\n",
        new="#include <memory>\n#include <stdexcept>\n#include <string>\n",
    ),
    Patch(
        name="gcc13-string",
        reason="std::string is used, and since gcc 13 no other header brings its declaration",
        file="horovod/common/group_table.h",
        old="#include <queue>\n#include <unordered_map>\n",
        new="#include <queue>\n#include <string>\n#include <unordered_map>\n",
    ),
    Patch(
        name="no-distutils-in-cmake",
        reason="Python 3.12 removed distutils, which was asked for the folder of Python.h",
        file="horovod/torch/CMakeLists.txt",
        old="from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        new="import sysconfig; print(sysconfig.get_path('include'))",
    ),
    Patch(
        name="no-distutils-in-runner",
        reason="Python 3.12 removed distutils; horovodrun imports it only to look for a program",
        file="horovod/runner/js_run.py",
        old="from distutils.spawn import find_executable\n",
        new="from shutil import which as find_executable\n",
    ),
    Patch(
        name="cuda-kernels-cxx14",
        reason="the headers of gcc >= 14 do not compile as C++11, the standard asked of nvcc",
        file="horovod/common/ops/cuda/CMakeLists.txt",
        old="set(CMAKE_CUDA_STANDARD 11)",
        new="set(CMAKE_CUDA_STANDARD 14)",
    ),
    Patch(
        name="rendezvous-token",
        reason="the rendezvous server answers everybody who can reach its port, so it must be shown the "
        "job's token; a refusal is final, and asking again only delays its message",
        file="horovod/common/gloo/http_store.cc",
        old=_PERFORM_HTTP,
        new=_PERFORM_HTTP_AUTHORIZED,
    ),
    Patch(
        name="rendezvous-refusal",
        reason="without it the refusal above is caught and tried again",
        file="horovod/common/gloo/http_store.cc",
        old=_RETRY,
        new="    } catch (const Refused&) {\n      throw;\n" + _RETRY,
    ),
    Patch(
        name="rendezvous-token-headers",
        reason="declares what the two patches above use",
        file="horovod/common/gloo/http_store.cc",
        old="#include <cstring>\n#include <iostream>\n",
        new="#include <cstdlib>\n#include <cstring>\n#include <iostream>\n",
    ),
    Patch(
        name="gloo-listen-in-range",
        reason="each pair of Gloo listens on a port of its own, which a firewall only lets through when "
        "it is known beforehand",
        file="third_party/gloo/gloo/transport/tcp/pair.cc",
        old=_GLOO_LISTEN,
        new=_GLOO_LISTEN_IN_RANGE,
    ),
    Patch(
        name="gloo-port-range",
        reason="reads the range of ports for the patch above from HOROWATT_PORTS",
        file="third_party/gloo/gloo/transport/tcp/pair.cc",
        old=_GLOO_CONSTANTS,
        new=_GLOO_CONSTANTS + _GLOO_PORT_RANGE,
    ),
    Patch(
        name="gloo-port-range-headers",
        reason="declares what the two patches above use",
        file="third_party/gloo/gloo/transport/tcp/pair.cc",
        old="#include <array>\n#include <algorithm>\n#include <sstream>\n",
        new="#include <array>\n#include <algorithm>\n#include <atomic>\n#include <cstdio>\n"
        "#include <random>\n#include <sstream>\n",
    ),
    Patch(
        name="process-sets-let-go",
        reason="after a failure survivors keep their old connections, so a rank that waits for one of them, "
        "and not for the dead one, learns of it only by the Gloo time-out, and all others wait for it",
        file="horovod/common/gloo/gloo_context.cc",
        old="""void GlooContext::Finalize() {
  if (!enabled_) {
    return;
  }

  global_ctx.reset();
  ctx.reset();
  cross_ctx.reset();
  local_ctx.reset();
  reset_ = true;
}
""",
        new="""void GlooContext::Finalize() {
  // The context of a process set is never enabled, and must close its connections all the same.
  global_ctx.reset();
  ctx.reset();
  cross_ctx.reset();
  local_ctx.reset();
  if (enabled_) {
    reset_ = true;
  }
}
""",
    ),
    Patch(
        name="one-mesh-for-all",
        reason="the process set of all processes builds every connection a second time, at each resize",
        file="horovod/common/gloo/gloo_context.cc",
        old="""  std::vector<int> ranks;
  if (registered_ranks.empty()) {
    ranks.resize(global_context.ctx->size);
""",
        new="""  if (registered_ranks.empty()) {
    // The set of all processes is used by the same thread as the global context, and has its connections.
    ctx = global_context.ctx;
    local_ctx = global_context.local_ctx;
    cross_ctx = global_context.cross_ctx;
    return;
  }

  std::vector<int> ranks;
  if (registered_ranks.empty()) {
    ranks.resize(global_context.ctx->size);
""",
    ),
)


def patched(text: str, patch: Patch) -> str:
    """Return ``text`` with the patch applied.

    Raises:
        NeedsOperator: ``HW-BLD-006`` when the text to replace is not there exactly once.
    """
    count = text.count(patch.old)
    if count != 1:
        raise NeedsOperator(
            "HW-BLD-006",
            f"the patch {patch.name} does not fit {patch.file}",
            because=f"the text to replace is there {count} times instead of once",
            hint="these patches are for Horovod's published 0.28.1 sources; remove a changed copy "
            "from the cache folder and try again",
            fields={"patch": patch.name, "file": patch.file},
        )
    return text.replace(patch.old, patch.new)


def apply_all(source: Path, patches: tuple[Patch, ...] = PATCHES) -> None:
    """Apply the patches to Horovod's unpacked source folder.

    Raises:
        NeedsOperator: ``HW-BLD-006`` when one does not fit, or its file is missing.
    """
    for patch in patches:
        path = source / patch.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        path.write_text(patched(text, patch), encoding="utf-8")


def digest(patches: tuple[Patch, ...] = PATCHES) -> str:
    """Return the SHA-256 over the text of the patches: other patches, other wheel."""
    parts = (part for patch in patches for part in (patch.file, patch.old, patch.new))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
