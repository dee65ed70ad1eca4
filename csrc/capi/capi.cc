#include "capi/capi.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "capi/requests.h"
#include "os/fork.h"

namespace torch_ckpt::capi {
namespace {

Result<Json> Dispatch(const char* request, size_t size) {
  TC_RETURN_IF_ERROR(NotInForkedChild());
  TC_ASSIGN_OR_RETURN(const Json parsed,
                      ParseObject({request, size}, "request"));
  TC_ASSIGN_OR_RETURN(const std::string op, GetString(parsed, "op"));
  const Handler handler = FindHandler(op);
  if (!handler) return InvalidArgument("unknown request '" + op + "'");
  return handler(parsed);
}

// No exception may cross the C boundary.
std::string Respond(const char* request, size_t size) {
  Status status;
  try {
    Result<Json> result = Dispatch(request, size);
    if (result.ok()) {
      // Names from disk are valid UTF-8; a path need not be.
      return Json{{"ok", *std::move(result)}}.dump(
          -1, ' ', true, Json::error_handler_t::replace);
    }
    status = result.status();
  } catch (const std::bad_alloc&) {
    status = Exhausted("out of memory");
  } catch (const std::exception& error) {
    status = Internal(error.what());
  }
  return ErrorJson(status).dump(-1, ' ', true, Json::error_handler_t::replace);
}

}  // namespace
}  // namespace torch_ckpt::capi

extern "C" {

char* torch_ckpt_call(const char* request, size_t size) {
  try {
    const std::string response = torch_ckpt::capi::Respond(request, size);
    char* copy = static_cast<char*>(std::malloc(response.size() + 1));
    if (copy) std::memcpy(copy, response.c_str(), response.size() + 1);
    return copy;
  } catch (...) {  // no memory even for the error
    return nullptr;
  }
}

void torch_ckpt_free(char* response) { std::free(response); }

const char* torch_ckpt_version(void) { return TORCH_CKPT_VERSION; }
}
