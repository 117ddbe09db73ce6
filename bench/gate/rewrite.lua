-- An administrator's Envoy filter to give each tenant its own cache_salt: parse the whole body, set the salt and the
-- model, write it again. Anything less (appending, patterns) lets a caller forge a salt by an escaped or repeated key.
-- The key itself was checked by Envoy's own filter, which names its client in the header x-tenant.

local SALTS = { acme = "@SALT@" }
local MODEL = "tiny"
local MAX_DEPTH = 64

local byte, sub, find, gsub, format, char = string.byte, string.sub, string.find, string.gsub, string.format, string.char
local concat, match = table.concat, string.match
local NULL = {}
local ARRAY = {}

local UNESCAPED = setmetatable(
  { ['"'] = '"', ["\\"] = "\\", ["/"] = "/", b = "\b", f = "\f", n = "\n", r = "\r", t = "\t" },
  { __index = function() error("bad escape") end })
local ESCAPED = { ['"'] = '\\"', ["\\"] = "\\\\" }
for code = 0, 31 do ESCAPED[char(code)] = format("\\u%04x", code) end
ESCAPED["\b"], ESCAPED["\f"], ESCAPED["\n"], ESCAPED["\r"], ESCAPED["\t"] = "\\b", "\\f", "\\n", "\\r", "\\t"

local function utf8_of(code)
  if code < 0x80 then return char(code) end
  if code < 0x800 then return char(0xC0 + math.floor(code / 64), 0x80 + code % 64) end
  if code < 0x10000 then
    return char(0xE0 + math.floor(code / 4096), 0x80 + math.floor(code / 64) % 64, 0x80 + code % 64)
  end
  return char(0xF0 + math.floor(code / 262144), 0x80 + math.floor(code / 4096) % 64, 0x80 + math.floor(code / 64) % 64,
    0x80 + code % 64)
end

local function hex_at(text, at)
  return tonumber(match(text, "^%x%x%x%x", at) or error("bad escape"), 16)
end

local function unescape(text)
  local out, count, at = {}, 0, 1
  while true do
    local stop = find(text, "\\", at, true)
    count = count + 1
    if not stop then
      out[count] = sub(text, at)
      return concat(out)
    end
    out[count] = sub(text, at, stop - 1)
    local letter = sub(text, stop + 1, stop + 1)
    count = count + 1
    if letter == "u" then
      local code = hex_at(text, stop + 2)
      at = stop + 6
      if code >= 0xD800 and code < 0xDC00 and sub(text, at, at + 1) == "\\u" then
        code = 0x10000 + (code - 0xD800) * 1024 + (hex_at(text, at + 2) - 0xDC00)
        at = at + 6
      end
      out[count] = utf8_of(code)
    else
      out[count] = UNESCAPED[letter]
      at = stop + 2
    end
  end
end

-- Returns the string that begins behind the quote at `from - 1`, and the position behind its closing quote. Searches
-- for one byte run at the speed of memory, patterns do not.
local function read_string(text, from)
  local at = from
  while true do
    local stop = find(text, '"', at, true) or error("unfinished string")
    local last = stop - 1
    while byte(text, last) == 92 do last = last - 1 end
    if (stop - last) % 2 == 1 then
      local raw = sub(text, from, stop - 1)
      if find(raw, "\\", 1, true) then raw = unescape(raw) end
      return raw, stop + 1
    end
    at = stop + 1
  end
end

local read_value

local function skip_space(text, at)
  local code = byte(text, at)
  if code and code > 32 then return at end
  return find(text, "[^ \t\r\n]", at) or #text + 1
end

local function read_object(text, at, depth)
  local value = {}
  at = skip_space(text, at)
  if byte(text, at) == 125 then return value, at + 1 end
  while true do
    if byte(text, at) ~= 34 then error("key expected") end
    local key
    key, at = read_string(text, at + 1)
    at = skip_space(text, at)
    if byte(text, at) ~= 58 then error("colon expected") end
    value[key], at = read_value(text, skip_space(text, at + 1), depth + 1)
    at = skip_space(text, at)
    local code = byte(text, at)
    if code == 125 then return value, at + 1 end
    if code ~= 44 then error("comma expected") end
    at = skip_space(text, at + 1)
  end
end

local function read_array(text, at, depth)
  local value, count = setmetatable({}, ARRAY), 0
  at = skip_space(text, at)
  if byte(text, at) == 93 then return value, at + 1 end
  while true do
    count = count + 1
    value[count], at = read_value(text, at, depth + 1)
    at = skip_space(text, at)
    local code = byte(text, at)
    if code == 93 then return value, at + 1 end
    if code ~= 44 then error("comma expected") end
    at = skip_space(text, at + 1)
  end
end

function read_value(text, at, depth)
  if depth > MAX_DEPTH then error("nested too deeply") end
  local code = byte(text, at)
  if code == 34 then return read_string(text, at + 1) end
  if code == 123 then return read_object(text, at + 1, depth) end
  if code == 91 then return read_array(text, at + 1, depth) end
  if code == 116 and sub(text, at, at + 3) == "true" then return true, at + 4 end
  if code == 102 and sub(text, at, at + 4) == "false" then return false, at + 5 end
  if code == 110 and sub(text, at, at + 3) == "null" then return NULL, at + 4 end
  local first, last = find(text, "^-?%d+%.?%d*[eE]?[+-]?%d*", at)
  local number = first and tonumber(sub(text, first, last))
  if not number then error("value expected") end
  return number, last + 1
end

local function write_string(out, count, text)
  if find(text, '[%c"\\]') then text = gsub(text, '[%c"\\]', ESCAPED) end
  out[count + 1], out[count + 2], out[count + 3] = '"', text, '"'
  return count + 3
end

local function write_value(out, count, value)
  local kind = type(value)
  if kind == "string" then return write_string(out, count, value) end
  if kind == "number" then
    out[count + 1] = format("%.17g", value)
    return count + 1
  end
  if kind == "boolean" then
    out[count + 1] = value and "true" or "false"
    return count + 1
  end
  if value == NULL then
    out[count + 1] = "null"
    return count + 1
  end
  if getmetatable(value) == ARRAY then
    out[count + 1] = "["
    count = count + 1
    for index = 1, #value do
      if index > 1 then
        count = count + 1
        out[count] = ","
      end
      count = write_value(out, count, value[index])
    end
    out[count + 1] = "]"
    return count + 1
  end
  out[count + 1] = "{"
  count = count + 1
  local first = true
  for key, item in pairs(value) do
    if not first then
      count = count + 1
      out[count] = ","
    end
    first = false
    count = write_string(out, count, key)
    count = count + 1
    out[count] = ":"
    count = write_value(out, count, item)
  end
  out[count + 1] = "}"
  return count + 1
end

local function rewrite(text, salt)
  local body, at = read_value(text, skip_space(text, 1), 1)
  if type(body) ~= "table" or getmetatable(body) == ARRAY or skip_space(text, at) <= #text then
    error("the body is not one JSON object")
  end
  body.cache_salt = salt
  body.model = MODEL
  local out = {}
  write_value(out, 0, body)
  return concat(out)
end

function envoy_on_request(request)
  local headers = request:headers()
  local salt = SALTS[headers:get("x-tenant")]
  if not salt then
    request:respond({ [":status"] = "403" }, "no tenant")
    return
  end
  local body = request:body()
  local good, rewritten = pcall(rewrite, body:getBytes(0, body:length()), salt)
  if not good then
    request:respond({ [":status"] = "400" }, "the body is not JSON")
    return
  end
  headers:replace("content-length", body:setBytes(rewritten))
end
