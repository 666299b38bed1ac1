package grammar

// formats are the values of "format" that bind a string, as regular expressions, each from the
// document named. JSON Schema's other formats are refused; names that it does not define mean
// nothing to it, and nothing here.
var formats = map[string]string{
	"date":      fmtDate,
	"time":      fmtTime,
	"date-time": `(?:` + fmtDate + `)[Tt]` + fmtTime,
	// ISO 8601 as RFC 3339, appendix A, has it.
	"duration": `P(?:\d+W|` + fmtDays + `(?:` + fmtHours + `)?|` + fmtHours + `)`,
	// RFC 5321, section 4.1.2: Mailbox, without quoted names and general addresses.
	"email":    `[\w!#$%&'*+/=?^` + "`" + `{|}~-]+(?:\.[\w!#$%&'*+/=?^` + "`" + `{|}~-]+)*@(?:` + fmtName + `(?:\.` + fmtName + `)*|\[` + fmtIPv4 + `\])`,
	"hostname": fmtLabel + `(?:\.` + fmtLabel + `)*`, // RFC 1123
	"ipv4":     fmtIPv4,
	"ipv6":     fmtIPv6, // RFC 4291, section 2.2, without dotted quads
	"uuid":     `[\da-fA-F]{8}-[\da-fA-F]{4}-[\da-fA-F]{4}-[\da-fA-F]{4}-[\da-fA-F]{12}`,
	// RFC 3986
	"uri":           `[A-Za-z][A-Za-z\d+.-]*:` + fmtHier + fmtAfterPath,
	"uri-reference": `(?:[A-Za-z][A-Za-z\d+.-]*:` + fmtHier + `|` + fmtRelative + `)` + fmtAfterPath,
	// RFC 6901 and its draft of relative pointers
	"json-pointer":          fmtPointer,
	"relative-json-pointer": `(?:0|[1-9]\d*)(?:#|` + fmtPointer + `)`,
}

const (
	fmtDate  = `\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|[12]\d))`
	fmtTime  = `(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)`
	fmtDays  = `(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)`
	fmtHours = `T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)`

	fmtName  = `[A-Za-z\d](?:[A-Za-z\d-]*[A-Za-z\d])?`
	fmtLabel = `[A-Za-z\d](?:[A-Za-z\d-]{0,61}[A-Za-z\d])?`
	fmtOctet = `(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)`
	fmtIPv4  = fmtOctet + `(?:\.` + fmtOctet + `){3}`
	fmtGroup = `[\da-fA-F]{1,4}`
	fmtIPv6  = `(?:` + fmtGroup + `(?::` + fmtGroup + `){7}` +
		`|::(?:` + fmtGroup + `(?::` + fmtGroup + `){0,6})?` +
		`|` + fmtGroup + `::(?:` + fmtGroup + `(?::` + fmtGroup + `){0,5})?` +
		`|` + fmtGroup + `(?::` + fmtGroup + `){1}::(?:` + fmtGroup + `(?::` + fmtGroup + `){0,4})?` +
		`|` + fmtGroup + `(?::` + fmtGroup + `){2}::(?:` + fmtGroup + `(?::` + fmtGroup + `){0,3})?` +
		`|` + fmtGroup + `(?::` + fmtGroup + `){3}::(?:` + fmtGroup + `(?::` + fmtGroup + `){0,2})?` +
		`|` + fmtGroup + `(?::` + fmtGroup + `){4}::(?:` + fmtGroup + `(?::` + fmtGroup + `){0,1})?` +
		`|` + fmtGroup + `(?::` + fmtGroup + `){5}::(?:` + fmtGroup + `)?` +
		`|` + fmtGroup + `(?::` + fmtGroup + `){6}::)`

	fmtPct       = `%[\da-fA-F]{2}`
	fmtUserinfo  = `(?:[A-Za-z\d._~!$&'()*+,;=:-]|` + fmtPct + `)*`
	fmtRegName   = `(?:[A-Za-z\d._~!$&'()*+,;=-]|` + fmtPct + `)*`
	fmtHost      = `(?:\[(?:` + fmtIPv6 + `|[vV][\da-fA-F]+\.[A-Za-z\d._~!$&'()*+,;=:-]+)\]|` + fmtRegName + `)`
	fmtPchar     = `(?:[A-Za-z\d._~!$&'()*+,;=:@-]|` + fmtPct + `)`
	fmtNoColon   = `(?:[A-Za-z\d._~!$&'()*+,;=@-]|` + fmtPct + `)`
	fmtAuthority = `//(?:` + fmtUserinfo + `@)?` + fmtHost + `(?::\d*)?(?:/` + fmtPchar + `*)*`
	fmtAbsolute  = `/(?:` + fmtPchar + `+(?:/` + fmtPchar + `*)*)?`
	fmtHier      = `(?:` + fmtAuthority + `|` + fmtAbsolute + `|` + fmtPchar + `+(?:/` + fmtPchar + `*)*|)`
	fmtRelative  = `(?:` + fmtAuthority + `|` + fmtAbsolute + `|` + fmtNoColon + `+(?:/` + fmtPchar + `*)*|)`
	fmtAfterPath = `(?:\?(?:` + fmtPchar + `|[/?])*)?(?:#(?:` + fmtPchar + `|[/?])*)?`
	fmtPointer   = `(?:/(?:[^/~]|~[01])*)*`
)

// longestOf are the most characters of the formats that have such a bound: RFC 1123's names are those of
// RFC 1034, section 3.1, whose 255 bytes have two that are not written.
var longestOf = map[string]int{"hostname": 253}

// openFormats are the formats that JSON Schema defines and that are not supported.
var openFormats = map[string]bool{
	"idn-email": true, "idn-hostname": true, "iri": true, "iri-reference": true, "uri-template": true, "regex": true,
}
