"""Asynchronous lanes, which become ready at different times: sorts their frames by lane, or in order of arrival."""
